"""The cache of passes that are replayed as CUDA graphs, and what such passes have at fixed addresses.

Shapes: P nodes of a bucket, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.cache import TreeCache
from ..engine.passes.inputs import MOST_MOVED, PassInputs
from ..engine.passes.static_cache import StaticStorage, StaticTreeCache, StaticView
from .capture import CapturedCalls


class GraphedCache(StaticTreeCache):
    """A static cache whose moves of rows wait for the next pass, which makes them on the device."""

    is_lasting = True  # a text that goes on finds its rows; other texts get other rows

    def __init__(self, storage: StaticStorage, capacity: int) -> None:
        super().__init__(storage, capacity, StaticView.move)
        self._moves: list[tuple[int, int]] = []

    def keep(self, base: int, rows: Sequence[int]) -> None:
        self.flush()
        super().keep(base, rows)

    def copy_rows(self, other: TreeCache, length: int) -> None:
        assert isinstance(other, GraphedCache)
        other.flush()
        super().copy_rows(other, length)

    def take_moves(self) -> list[tuple[int, int]]:
        """Return the waiting moves, (source, target), which the caller makes now."""
        moves, self._moves = self._moves, []
        return moves

    def flush(self) -> None:
        """Make the waiting moves."""
        if moves := self.take_moves():
            sources, targets = zip(*moves, strict=True)
            StaticTreeCache._move(self, sources, targets[0])

    def _move(self, rows: Sequence[int], start: int) -> None:
        if len(rows) > MOST_MOVED:
            super()._move(rows, start)
        else:
            self._moves = [*zip(rows, range(start, start + len(rows)), strict=True)]


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
