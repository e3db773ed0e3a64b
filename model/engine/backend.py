"""The seam under the loop: what runs a draft through the model, and what a pass needs before and after.

The loop, a sequence and verification know a backend by this contract alone. There are three: the stock model, the
same with our kernels and programs on a CPU (both `model.backends.target`), and passes replayed as CUDA graphs
(`model.backends.graphs.graphed_target`). What they change within the model they undo before a call returns.

A step is: draft -> `forward(draft, cache)` -> `read_out` -> accepted -> `cache.keep(base, accepted)`.

Shapes: N nodes, V vocabulary, C prompt tokens in a chunk, D size of hidden states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from .read_out import ReadOut
from .tree import DraftTree

PREFILL_CHUNK = 2048  # most prompt tokens C in one pass


class PromptChunk(NamedTuple):
    """A chunk of the prompt that was read: its tokens and, if asked for, the logits after each [C, V]."""

    token_ids: Sequence[int]
    logits: torch.Tensor | None


class Rows(Protocol):
    """The cache of one sequence."""

    @property
    def length(self) -> int:
        """Rows in use."""

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Keep the first `base` rows and, after them, the rows `base + rows[i]`; forget the others."""

    def mark(self) -> None:
        """Make it possible to go back to the rows in use now; only the last mark counts."""


class PrefixRows(Protocol):
    """Holds the rows of earlier sequences for the next one."""

    def open(self, target: Any, prompt_ids: Sequence[int], capacity: int) -> Any:
        """Return `Rows` that begin with those of the prompt that are kept."""

    def store(self, cache: Any, tokens: Sequence[int]) -> None:
        """Keep the rows of a sequence so far."""


class Hidden(Protocol):
    """Hidden states of passes, for drafters that read them."""

    def captured(self) -> AbstractContextManager[None]:
        """Within the block each pass of this thread leaves them for `take`."""

    def take(self, num_rows: int) -> torch.Tensor:
        """Return those of the last pass over so many rows, [N, D]."""


class Backend(Protocol):
    """A model that runs drafts. Its passes exclude each other; a pass of another thread waits."""

    num_tokens: int  # that the input embedding has

    def check_model(self) -> None: ...  # as it was proved? A sequence begins with it

    def context_limit(self) -> int | None: ...

    def hidden_states(self, layers: tuple[int, ...]) -> Any: ...

    @property
    def num_prepared(self) -> int:
        """Graphs captured so far; a step in which one was is not used to learn costs."""

    @property
    def head_share(self) -> float:
        """Share of the output head in the weights: what the prompt's logits cost."""

    def new_cache(self, capacity: int) -> Any:
        """Return the empty `Rows` of a sequence."""

    def prefill(
        self, prompt_ids: Sequence[int], cache: Any, with_logits: bool
    ) -> Iterator[PromptChunk]:
        """Read the prompt in chunks from the cache's end to its last token, which is the first draft's root."""

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next counts finished work."""

    def chain_only_at(self, base: int, num_nodes: int) -> bool:
        """Whether a draft of up to so many nodes after `base` rows must be a chain."""

    def max_depth_at(self, base: int) -> int:
        """Return how deep a draft after `base` rows may be."""

    def reads_anew_at(self, base: int) -> bool:
        """Whether a text that has grown to `base` rows is read again before the next token."""

    def forward(self, tree: DraftTree, cache: Any) -> torch.Tensor:
        """Append all nodes to the cache; return the logits after each [N, V], valid until the next pass."""

    def read_out(
        self,
        cache: Any,
        tree: DraftTree,
        logits: torch.Tensor,
        num_candidates: int,
        with_samples: bool,
    ) -> ReadOut:
        """Copy to the host what is read of the last pass, in one transfer."""

    def device_step(self, drafting: Any, tie_margin: float, eos_ids: Collection[int]) -> Any:
        """Return a drafter's steps that run whole on the device; None if they cannot."""

    @property
    def tie_margin(self) -> float:
        """The relative difference of logits below which plain decoding decides their order; 0: never."""

    def is_reference(self, num_rows: int) -> bool:
        """Whether a prompt chunk of this length, or a single row, is plain decoding's bit for bit anyway."""

    def reference(self) -> AbstractContextManager[None]:
        """Within the block prompts and single rows are plain decoding's, bit for bit."""
