"""The KV cache of the last sequence, kept for the next sequence with the same beginning, as in a chat.

The rows of the common prefix stay; only what follows is computed. Kept rows may come from passes of
other shapes, so they differ by rounding from those of a fresh prompt and never count as reference
rows: in float32 the first near-tie reads the whole prompt again (`ReferenceRows`),
and every token stays the same.

Shapes: T rows in use.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..target import TargetModel
from .cache import TreeCache
from .weights import Weights

# Fewer common tokens are read again: comparing the weights takes about as long as a pass.
FEWEST_KEPT = 8


class PrefixCache:
    """Holds the cache between two sequences of one model."""

    def __init__(self) -> None:
        self._cache: TreeCache | None = None
        self._tokens: Sequence[int] = ()
        self._num_rows = 0
        # With which its rows were computed; None: not recorded.
        self._weights: Weights | None = None
        self._has_shared = True  # whether the last sequence began as the one before it

    def open(self, target: TargetModel, prompt_ids: Sequence[int], capacity: int) -> TreeCache:
        """Return a cache for `capacity` rows that holds the rows of the prompt's known beginning.

        The prompt's last token is never among them: it is the first tree's root. Nothing is kept if
        anything has changed that the model computes with, or if rows depend on the parts in which the sequence was
        read, or on its length and it is beyond the border (longrope). Weights are read whole for that, which takes
        as long as a pass; so it is left out once two sequences had no beginning in common.
        """
        cache, self._cache = self._cache, None  # lost if reading the prompt fails
        border = target.borders.rope
        num_known = min(self._num_rows, len(prompt_ids) - 1)
        num_common = _common_length(self._tokens[:num_known], prompt_ids) if cache else 0
        may_keep = (
            target.is_same_in_parts
            and (border is None or (self._num_rows < border and len(prompt_ids) <= border))
            and not target.snapshot.own.hooks  # a hook may do anything
        )
        has_common = may_keep and num_common >= FEWEST_KEPT
        before, self._weights = self._weights, None
        if may_keep and (has_common or self._has_shared):
            self._weights = Weights.of(target)
        self._has_shared = has_common
        if cache is None or not has_common or self._weights is None or self._weights != before:
            del cache  # its rows may be used again
            return target.new_cache(capacity)
        num_common = cache.nearest(num_common)
        if cache.capacity >= capacity:
            cache.keep(num_common, ())
            return cache
        larger = target.new_cache(capacity)
        larger.copy_rows(cache, num_common)
        return larger

    def store(self, cache: TreeCache, sequence: Sequence[int]) -> None:
        """Keep the cache, whose rows belong to the first tokens of `sequence`; both may go on growing."""
        if not cache.is_lasting:
            return
        self._cache = cache
        self._tokens = sequence
        self._num_rows = cache.length

    def clear(self) -> None:
        """Forget the sequence and free its rows."""
        self._cache = None
        self._tokens = ()
        self._num_rows = 0


def _common_length(known: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Return the length of the common prefix; `known` is not the longer one."""
    for index, token in enumerate(known):
        if token != prompt_ids[index]:
            return index
    return len(known)
