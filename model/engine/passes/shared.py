"""Passes that the texts of a batch share: what a batch asks of them, whatever their layout.

Shapes: N nodes of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from ..cache import TreeCache
from ..read_out import ReadOut
from ..tree import DraftTree


class SharedPass(NamedTuple):
    """The outcome of a pass over the trees of several texts.

    Attributes:
        logits: after every node of each text, [N, V] each; valid until the next pass.
        read: copies what is read of all texts to the host in one transfer; takes the number of candidates, and
            whether sketches are wanted.
    """

    logits: Sequence[torch.Tensor]
    read: Callable[[int, bool], list[ReadOut]]


class SharedPasses(Protocol):
    """Passes of one batch, over the caches that it got here."""

    def new_cache(self, capacity: int, first: TreeCache | None = None) -> TreeCache:
        """Return a cache for a text of up to `capacity` rows.

        Args:
            capacity: rows of the text and one tree.
            first: holds the first rows of the text; it has room for all, and is not used elsewhere.
        """
        ...

    def release(self, cache: TreeCache) -> None:
        """Take back the cache of a text that has left."""
        ...

    def is_plain(self, num_texts: int) -> bool:
        """Whether passes of this many texts are those of the loop of one text, bit for bit."""
        ...

    def forward(self, trees: Sequence[DraftTree], caches: Sequence[TreeCache]) -> SharedPass:
        """Append the nodes of each text's tree to its cache, in one pass; its hidden states, if they are captured
        (`passes.hidden`), are those of all nodes, text after text.
        """
        ...
