"""Shapes of passes: a stock model takes any, with nothing to prepare.

CUDA graphs need a few fixed shapes (`model.backends.graphs.graphed_target`), which are prepared before times are
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from ...engine.batch import SharedPasses

# Rows shown of a slot are a multiple of this.
SHOWN_STEP = 64


class Preparation(NamedTuple):
    """Work done ahead of steps, such as captures.

    Attributes:
        num_graphs: CUDA graphs.
        seconds: spent on captures, with the first calls.
    """

    num_graphs: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return one line; empty if nothing was prepared."""
        plural = "s" * (self.num_graphs > 1)
        done = f"{self.num_graphs} CUDA graph{plural}, prepared in {self.seconds:.1f} s"
        return done if self.num_graphs else ""


class PassShapes:
    """The shapes of passes; here any shape, and nothing to prepare."""

    @property
    def num_prepared(self) -> int:
        """Calls captured so far; a step in which one was is not used to learn costs."""
        return 0

    @property
    def num_late(self) -> int:
        """Shapes prepared after the last warm-up, which a measured time then includes."""
        return 0

    @property
    def preparation(self) -> Preparation:
        """The graphs captured so far."""
        return Preparation()

    def padded_size(self, num_nodes: int) -> int:
        """Return the rows of a pass over a draft of this many nodes."""
        return num_nodes

    def expect_drafts(self, num_nodes: Collection[int]) -> None:
        """Note sizes of drafts that may come, for the next warm-up."""

    def expect_reads(
        self, num_candidates: int, with_samples: bool, hidden_layers: tuple[int, ...]
    ) -> None:
        """Note what is read of passes, for the next warm-up."""

    def warm_up(self, num_tokens: int, num_nodes: Collection[int] = ()) -> None:
        """Prepare passes over drafts of these sizes after texts of up to `num_tokens` tokens."""

    def device_step(self, drafting: Any, tie_margin: float, eos_ids: Collection[int]) -> Any:
        """Return a drafter's steps that run whole on the device; None if they cannot."""
        return None

    def replayed(self, storage: Any, key: tuple[object, ...], call: Callable[[], Any]) -> Any:
        """Return the output of a call over the rows of a storage; what may replay it tells it by its key."""
        return call()

    def kept(self, storage: Any, logits: torch.Tensor) -> torch.Tensor:
        """Return a pass's logits where later calls over this storage may read them."""
        return logits

    def rows_shown(self, num_rows: int) -> int:
        """Return the rows of each slot that a pass shows which reads and writes this many."""
        return -(-num_rows // SHOWN_STEP) * SHOWN_STEP

    def slot_passes(self, size: int) -> SharedPasses | None:
        """Return passes over slots in a way of this target's own, for up to `size` texts; None: the usual ones."""
        return None
