"""Residual blocks, of which Medusa's and Hydra's heads are made.

Shapes: D hidden size, C inputs.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """x + silu(W x + b); with several inputs side by side, R x takes the place of x.

    Names of the weights are those of the published checkpoints.
    """

    def __init__(self, size: int, num_inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs * size, size)
        self.res_connection = (
            nn.Identity() if num_inputs == 1 else nn.Linear(num_inputs * size, size)
        )
        nn.init.zeros_(self.linear.weight)  # training begins at the input itself

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [..., C * D] to [..., D]."""
        skipped: torch.Tensor = self.res_connection(inputs)
        return skipped + F.silu(self.linear(inputs))
