"""Identifies the requests of a batch by their texts, since vLLM gives a drafter no request ids."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .text_index import LONGEST_MATCH, TextIndex

# Last tokens that tell texts of the same length apart.
TAIL = LONGEST_MATCH
# Steps that a request may be left out of (no budget, preemption) before it counts as ended.
MOST_ABSENT = 64
Key = tuple[int, bytes]


@dataclass
class RequestState:
    """A request between two steps."""

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

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def take(self, text: np.ndarray) -> RequestState | None:
        """Return the request that has this text, and forget it.

        None if there is none, or if several have this text and different drafts.
        """
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
        """Keep a request until its text is seen again.

        Args:
            request: taken or begun in this step.
            text: all its tokens.
            num_new: tokens at the end that its index does not have.
        """
        if num_new and request.index.has_room(num_new):
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
