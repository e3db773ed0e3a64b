"""The graphs of passes, and what such passes have at fixed addresses.

Shapes: P nodes of a bucket, V vocabulary.
"""

from __future__ import annotations

import torch

from ..engine.passes.inputs import PassInputs
from .capture import CapturedCalls


class Passes:
    """Passes over the rows of one storage: where their inputs and logits are, and their graphs.

    Args:
        device: a GPU.

    Attributes:
        calls: the graphs.
        logits: of the last pass over each bucket of nodes, [P, V].
        last: the logits of the last pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.calls = CapturedCalls(device)
        self.logits: dict[int, torch.Tensor] = {}
        self.last: torch.Tensor | None = None
        self._inputs: dict[int, PassInputs] = {}

    def inputs_of(self, num_padded: int) -> PassInputs:
        """Return the inputs of passes over P nodes; the same object on every call."""
        if num_padded not in self._inputs:
            self._inputs[num_padded] = PassInputs(num_padded, self._device)
        return self._inputs[num_padded]

    def keep_logits(self, logits: torch.Tensor) -> None:
        """Copy logits [P, V] to their place, from which read-outs read, whatever the number of cache rows."""
        num_padded = len(logits)
        if num_padded not in self.logits:
            with torch.inference_mode(False):
                self.logits[num_padded] = torch.empty(
                    logits.shape, dtype=logits.dtype, device=logits.device
                )
        self.logits[num_padded].copy_(logits)
