"""Passes of a batch over slots (`model.engine.passes.slot_passes`), replayed as CUDA graphs.

Shapes: B texts shown, N nodes of each, T rows shown of each slot, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..engine.passes.hidden import HiddenStates
from ..engine.passes.slot_passes import Computed, PassShape, SlotPasses, SlotTarget
from ..engine.passes.slots import Slots
from ..engine.passes.static_cache import StaticStorage
from .passes import Passes
from .target import length_bucket


class GraphedSlotTarget(SlotTarget, Protocol):
    """The part of a target model that replayed passes over slots need."""

    def passes_over(self, storage: StaticStorage) -> Passes: ...

    def replayed(self, passes: Passes, key: tuple[object, ...], call: Callable[[], Any]) -> Any: ...


class GraphedSlotPasses(SlotPasses):
    """The passes of a batch, each replayed as a graph of its shape.

    Args:
        target: the model.
        size: as of `SlotPasses`.
        slots: as of `SlotPasses`; their graphs are replayed again.
    """

    def __init__(self, target: GraphedSlotTarget, size: int, slots: Slots | None) -> None:
        super().__init__(target, size, slots)
        self._graphed = target

    def _num_shown(self, num_rows: int) -> int:
        return length_bucket(num_rows)

    def _computed(
        self, shape: PassShape, hidden: HiddenStates | None, probes: torch.Tensor | None
    ) -> Computed:
        assert probes is None  # refused by `StaticTarget.check_probes`
        passes = self._graphed.passes_over(self.slots.storage)
        compute = super()._computed

        def call() -> dict[int, torch.Tensor]:
            done = compute(shape, hidden, None)
            passes.keep_logits(done.logits)
            return done.hidden

        key = (shape, hidden and hidden.wanted)
        rows = self._graphed.replayed(passes, key, call)
        return Computed(passes.logits[shape.num_texts * shape.num_nodes], rows)

    def _packed(
        self, shape: PassShape, logits: torch.Tensor, num_candidates: int, with_sketches: bool
    ) -> torch.Tensor:
        passes, pack = self._graphed.passes_over(self.slots.storage), super()._packed
        key = (shape.num_texts, shape.num_nodes, num_candidates, with_sketches)
        packed: torch.Tensor = self._graphed.replayed(
            passes, key, lambda: pack(shape, logits, num_candidates, with_sketches)
        )
        return packed
