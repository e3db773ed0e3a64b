"""KV caches of the texts before, kept for texts with the same beginning, as the next turn of a chat.

The rows of the common beginning stay; only what follows is computed. Kept rows may come from passes of
other shapes, so they differ by rounding from those of a fresh prompt and never count as reference
rows: in float32 the first near-tie reads the whole prompt again (`ReferenceRows`),
and every token stays the same.

Shapes: T rows in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..target import TargetModel
from .cache import TreeCache
from .weights import Weights

# Fewer common tokens are read again: comparing the weights takes about as long as a pass.
FEWEST_KEPT = 8
# Sequences in a row without a known beginning, after which the weights are not compared any more.
MOST_UNSHARED = 16
# Bytes of rows in use that are kept beside those of the last text.
MOST_BYTES = 2**29
# Times the rows in use, above which their cache is copied into one that has room for them alone.
LARGE = 1.5


@dataclass(slots=True, eq=False)
class _Kept:
    """The rows of the first tokens of a text, both of which may go on growing."""

    cache: TreeCache
    tokens: Sequence[int]
    num_rows: int

    def num_common(self, prompt_ids: Sequence[int]) -> int:
        """Return the rows of a prompt's beginning; its last token, the first tree's root, is never among them."""
        num_known = min(self.num_rows, len(prompt_ids) - 1)
        return _common_length(self.tokens[:num_known], prompt_ids)

    @property
    def num_bytes(self) -> float:
        return self.cache.num_bytes * self.num_rows / self.cache.capacity

    def shrink(self, new_cache: Callable[[int], TreeCache]) -> None:
        """Give back room for rows that are not in use, since no text goes on there; states have no such room."""
        if self.cache.capacity > LARGE * self.num_rows and not self.cache.has_states:
            small = new_cache(self.num_rows)
            small.copy_rows(self.cache, self.num_rows)
            self.cache = small


class PrefixCache:
    """Holds the caches of earlier sequences of one model, the last one and as many before it as `most_bytes` allow.

    On other devices than the CPU it holds the last one alone: graphs are captured for each cache.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._kept: list[_Kept] = []  # the least recently used first
        # With which their rows were computed; None: not recorded.
        self._weights: Weights | None = None
        self._num_unshared = 0  # sequences since the last one that began as one before it
        self._new_cache: Callable[[int], TreeCache] | None = None  # of the target, on a CPU

    def open(self, target: TargetModel, prompt_ids: Sequence[int], capacity: int) -> TreeCache:
        """Return a cache for `capacity` rows that holds the rows of the prompt's longest known beginning.

        Nothing is kept if anything has changed that the model computes with, or if rows depend on the parts in
        which the sequence was read, or on its length and it is beyond the border (longrope). Weights are read whole
        for that, which takes as long as a pass; so it is left out once `MOST_UNSHARED` sequences in a row had no
        beginning in common with one before.
        """
        if target.device.type == "cpu":
            self._new_cache = target.new_cache
        else:
            del self._kept[:-1]
        kept = max(self._kept, key=lambda one: one.num_common(prompt_ids), default=None)
        num_common = kept.num_common(prompt_ids) if kept else 0
        border = target.borders.rope
        num_rows = kept.num_rows if kept else 0
        may_keep = (
            target.is_same_in_parts
            and (border is None or (num_rows < border and len(prompt_ids) <= border))
            and not target.snapshot.own.hooks  # a hook may do anything
        )
        has_common = may_keep and num_common >= FEWEST_KEPT
        before, self._weights = self._weights, None
        self._num_unshared = 0 if has_common else self._num_unshared + 1
        if may_keep and self._num_unshared <= MOST_UNSHARED:
            self._weights = Weights.of(target)
        if self._weights is None or self._weights != before:
            self._kept.clear()  # their rows may be others now
            has_common = False
        if kept is None or not has_common:
            if target.device.type != "cpu":
                self._kept.clear()
                del kept  # its rows may be used again
            return target.new_cache(capacity)
        cache = kept.cache
        num_common = cache.nearest(num_common)
        if 2 * num_common > kept.num_rows:
            # The text goes on; a shorter beginning is that of several.
            self._kept.remove(kept)  # lost if reading the prompt fails
            if cache.capacity >= capacity:
                cache.keep(num_common, ())
                return cache
        larger = target.new_cache(capacity)
        larger.copy_rows(cache, num_common)
        return larger

    def store(self, cache: TreeCache, sequence: Sequence[int]) -> None:
        """Keep the cache, whose rows belong to the first tokens of `sequence`; both may go on growing."""
        if not cache.is_lasting or not cache.length:
            return
        if not self._kept or self._kept[-1].cache is not cache:
            self._kept = [one for one in self._kept if one.cache is not cache]
            if self._kept and self._new_cache is not None:
                self._kept[-1].shrink(self._new_cache)
            while sum(one.num_bytes for one in self._kept) > self.most_bytes:
                del self._kept[0]
            self._kept.append(_Kept(cache, sequence, cache.length))
        self._kept[-1].num_rows = cache.length

    def clear(self) -> None:
        """Forget all sequences and free their rows."""
        self._kept.clear()


def _common_length(known: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Return the length of the common prefix; `known` is not the longer one."""
    for index, token in enumerate(known):
        if token != prompt_ids[index]:
            return index
    return len(known)
