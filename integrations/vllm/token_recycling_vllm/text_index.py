"""Finds the latest earlier place, in a text or a bounded history of texts, that agrees with a text's end.

Sources: prompt lookup (github.com/apoorvumang/prompt-lookup-decoding); SuffixDecoding (arXiv
2411.04975), whose global tree keeps earlier outputs as the history does here. A hash table keeps the
latest place of every n-gram of a few lengths; a place found is compared token by token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Lengths of n-grams looked up, the longest first.
LENGTHS = (8, 4, 2, 1)
# Longest match that is told from shorter ones.
LONGEST_MATCH = 32
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1


class TextMatch(NamedTuple):
    """An earlier place that agrees with the end of a text."""

    continuation: np.ndarray  # the tokens that followed there
    length: int  # tokens that agree


class TextIndex:
    """The newest `capacity` tokens in a ring, with an index of their n-grams, the longest first."""

    def __init__(self, capacity: int, lengths: tuple[int, ...] = LENGTHS) -> None:
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._lengths = lengths
        num_slots = 1 << max(4, (2 * capacity - 1).bit_length())
        self._mask = num_slots - 1
        self._places = np.full((len(lengths), num_slots), -1, dtype=np.int32)
        self._end = 0  # where the next token is written
        self._begin = 0  # of the text being written

    @property
    def num_bytes(self) -> int:
        return self._tokens.nbytes + self._places.nbytes

    @property
    def text(self) -> np.ndarray:
        """The tokens of the text being written."""
        return self._tokens[self._begin : self._end]

    def has_room(self, count: int) -> bool:
        """Whether so many tokens can be appended to the text."""
        return self._end + count <= len(self._tokens)

    def begin(self, room: int) -> None:
        """Begin a new text of at most `room` tokens; n-grams do not cross its begin."""
        if self._end + room > len(self._tokens):
            self._end = 0
        self._begin = self._end

    def append(self, tokens: np.ndarray) -> None:
        """Append tokens [n] to the text."""
        first, end = self._end, self._end + len(tokens)
        self._tokens[first:end] = tokens
        self._end = end
        # The n-gram before each new token; the one at the end has no continuation yet.
        for table, length in zip(self._places, self._lengths, strict=True):
            start = max(first, self._begin + length)
            if start < end:
                table[self._slots(start, end, length)] = np.arange(start, end)

    def longest_match(self, tail: list[int], count: int) -> TextMatch | None:
        """Return the latest place that agrees with the longest looked-up end of a tail, or None.

        Args:
            tail: the last tokens of a text, LONGEST_MATCH at most are compared.
            count: tokens of the continuation, at most.
        """
        for table, length in zip(self._places, self._lengths, strict=True):
            if length > len(tail):
                continue
            place = int(table[self._slot(tail[-length:])])
            if place < length or self._tokens[place - length : place].tolist() != tail[-length:]:
                continue
            earlier = self._tokens[max(0, place - LONGEST_MATCH) : place].tolist()
            agreeing = length
            most = min(len(tail), len(earlier))
            while agreeing < most and earlier[-1 - agreeing] == tail[-1 - agreeing]:
                agreeing += 1
            return TextMatch(self._tokens[place : min(place + count, self._last(place))], agreeing)
        return None

    def _last(self, place: int) -> int:
        """Return where the tokens after a place stop being consecutive, since newer tokens overwrite the ring."""
        return self._end if place < self._end else len(self._tokens)

    def _slots(self, start: int, end: int, length: int) -> np.ndarray:
        mixed = np.zeros(end - start, dtype=np.uint64)
        for offset in range(length):
            tokens = self._tokens[start - length + offset : end - length + offset]
            mixed = (mixed ^ tokens.astype(np.uint64)) * _FACTOR
        return ((mixed >> np.uint64(32)) & np.uint64(self._mask)).astype(np.int64)

    def _slot(self, tokens: list[int]) -> int:
        mixed = 0
        for token in tokens:
            mixed = ((mixed ^ token) * int(_FACTOR)) & _MASK
        return (mixed >> 32) & self._mask
