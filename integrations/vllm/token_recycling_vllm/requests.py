"""The requests of a batch, told apart by their texts, and earlier places in texts that agree with a text's end.

vLLM gives a drafter no request ids. Sources of the index: prompt lookup
(github.com/apoorvumang/prompt-lookup-decoding); SuffixDecoding (arXiv 2411.04975), whose global tree keeps
earlier outputs as the history does here. A hash table keeps the latest place of every n-gram of a few
lengths; a place found is compared token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# Lengths of n-grams looked up, the longest first.
LENGTHS = (8, 4, 2, 1)
# Longest match that is told from shorter ones.
LONGEST_MATCH = 32
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1
# Last tokens that tell texts of the same length apart.
TAIL = LONGEST_MATCH
# Steps that a request may be left out of (no budget, preemption) before it counts as ended.
MOST_ABSENT = 64
Key = tuple[int, bytes]


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
    def text(self) -> np.ndarray:
        return self._tokens[self._begin : self._end]

    def has_capacity(self, count: int) -> bool:
        return self._end + count <= len(self._tokens)

    def begin(self, room: int) -> None:
        """Begin a new text of at most `room` tokens; n-grams do not cross its begin."""
        if self._end + room > len(self._tokens):
            self._end = 0
        self._begin = self._end

    def append(self, tokens: np.ndarray) -> None:
        first, end = self._end, self._end + len(tokens)
        self._tokens[first:end] = tokens
        self._end = end
        # The n-gram before each new token; the one at the end has no continuation yet.
        for table, length in zip(self._places, self._lengths, strict=True):
            start = max(first, self._begin + length)
            if start < end:
                table[self._slots(start, end, length)] = np.arange(start, end)

    def longest_match(self, tail: list[int], count: int) -> tuple[np.ndarray, int] | None:
        """Return up to `count` tokens that followed the latest place that agrees with the longest looked-up end
        of a text's last tokens, and how many agree there (LONGEST_MATCH are compared); None without such a place.
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
            # Where tokens stop being consecutive, since newer ones overwrite the ring.
            last = self._end if place < self._end else len(self._tokens)
            return self._tokens[place : min(place + count, last)], agreeing
        return None

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


@dataclass
class RequestState:
    text_number: int  # from 1; 0 for all requests that share their rows
    index: TextIndex  # its text
    tokens: list[int] = field(default_factory=list)  # the likeliest chain after its text
    kinds: list[int] = field(default_factory=list)  # of these guesses
    num_drafted: int = 0  # how many of them were drafted
    last_step: int = 0  # when it was last in a batch

    @property
    def drafted(self) -> list[int]:
        return self.tokens[: self.num_drafted]


class Requests:
    """All requests that may go on.

    Args:
        share: whether requests draft from each other's rows, and from the texts of ended ones.
        history_tokens: tokens of ended requests that are kept, at most.
    """

    def __init__(self, share: bool, history_tokens: int) -> None:
        self._share = share
        self.history = TextIndex(history_tokens) if share and history_tokens else None
        self._longest_kept = history_tokens // 4
        self._known: dict[Key, list[RequestState]] = {}
        self._num_seen = 0
        self._step = 0

    def take(self, text: np.ndarray) -> RequestState | None:
        """Return the request that has this text, and forget it; None if none has, or several with other drafts."""
        key = _key_of(text)
        found = self._known.get(key)
        if not found:
            return None
        if any(request.drafted != found[0].drafted for request in found):
            del self._known[key]
            return None
        request = found.pop()
        if not found:
            del self._known[key]
        return request

    def begin(self, text: np.ndarray) -> RequestState:
        self._num_seen += 1
        return RequestState(0 if self._share else self._num_seen, _index_of(text))

    def keep(self, request: RequestState, text: np.ndarray, num_new: int) -> None:
        """Keep a request until its text is seen again; its index lacks the text's last `num_new` tokens."""
        if num_new and request.index.has_capacity(num_new):
            request.index.append(text[-num_new:])
        elif num_new:
            request.index = _index_of(text)
        request.last_step = self._step
        self._known.setdefault(_key_of(text), []).append(request)

    def end_step(self) -> None:
        """Move the texts of requests that did not come back to the history."""
        self._step += 1
        oldest = self._step - MOST_ABSENT
        ended = [key for key, found in self._known.items() if found[0].last_step < oldest]
        for key in ended:
            for request in self._known.pop(key):
                if self.history is not None:
                    text = request.index.text[-self._longest_kept :]
                    self.history.begin(len(text))
                    self.history.append(text)


def _key_of(text: np.ndarray) -> Key:
    return len(text), text[-TAIL:].tobytes()


def _index_of(text: np.ndarray) -> TextIndex:
    index = TextIndex(max(256, 2 * len(text)))
    index.append(text)
    return index
