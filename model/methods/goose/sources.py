"""The sources of Goose: what followed the text's end before, and recycled successors.

The spine is what followed the last five, four or three tokens where they occurred first. Section 4.3 of the paper
rates a match by two signs: whether all earlier occurrences went on with the same token, and how many tokens are
there to copy. The branches are Token Recycling's rows, keyed by the last two tokens and by the last one.

Shapes: R rows, k successors in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...budget.memory import check_names

NGRAM_SIZES = (5, 4, 3)
# Tokens from which on a chain counts as long.
LONG_CHAIN = 8
# A chain trusted more than this is looked up further from its own end.
EXTENDING = 0.6
# Stands for the token before, in the key of a row of one token.
NONE = -1
FIRST_CAPACITY = 1024
Successors = list[tuple[int, float]]


@dataclass(slots=True)
class _Occurrences:
    start: int  # where the first one's continuation begins
    is_single: bool = True  # whether there is one only
    agree: bool = True  # whether the same token followed all of them


class EarlierText:
    """Prompt and answer so far, with an index of its n-grams.

    `max_chain`: longest continuation of one look-up; `max_extended_chain`: of several, at full confidence.
    """

    def __init__(self, max_chain: int, max_extended_chain: int) -> None:
        self._max_chain = max_chain
        self._max_extended_chain = max_extended_chain
        self.clear()

    def clear(self) -> None:
        self.tokens: list[int] = []
        self._occurrences: dict[tuple[int, ...], _Occurrences] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; an n-gram is indexed when its continuation exists, so no suffix finds itself."""
        text = self.tokens
        for token in tokens:
            for size in NGRAM_SIZES:
                if size <= len(text):
                    self._index(tuple(text[-size:]), token)
            text.append(token)

    def chain(self) -> tuple[list[int], float]:
        """Return the continuation of the text's end, and the confidence in it, 0 to 1."""
        return self._look_up(self.tokens[-NGRAM_SIZES[0] :])

    def extended(self, chain: list[int], confidence: float) -> list[int]:
        """Return a trusted chain and what look-ups from its end add, at full confidence up to one with less."""
        if confidence <= EXTENDING:
            return chain
        longest = int(self._max_extended_chain * confidence)
        chain = list(chain)
        end = self.tokens[-NGRAM_SIZES[0] :] + chain
        while len(chain) < longest:
            following, trust = self._look_up(end[-NGRAM_SIZES[0] :])
            chain += following
            end += following
            if not following or (confidence >= 1.0 and trust < 1.0):
                break
        return chain

    def _index(self, ngram: tuple[int, ...], token: int) -> None:
        known = self._occurrences.get(ngram)
        if known is None:
            self._occurrences[ngram] = _Occurrences(len(self.tokens))
            return
        known.is_single = False
        known.agree = known.agree and token == self.tokens[known.start]

    def _look_up(self, suffix: list[int]) -> tuple[list[int], float]:
        """Return the continuation of the longest n-gram at the end of `suffix`, and the confidence in it."""
        for size in NGRAM_SIZES:
            found = self._occurrences.get(tuple(suffix[-size:]))
            if found is not None:
                chain = self.tokens[found.start : found.start + self._max_chain]
                return chain, _confidence(len(chain), found.agree and not found.is_single)
        return [], 0.0


def _confidence(length: int, is_consensus: bool) -> float:
    if is_consensus:
        return 1.0
    if length >= LONG_CHAIN:
        return min(0.9, 0.7 + 0.2 * (length - LONG_CHAIN) / 12.0)
    return 0.6 * length / LONG_CHAIN


class SuccessorTable:
    """The k likeliest successors of tokens, with their shares: probabilities among the k."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.clear()

    def clear(self) -> None:
        self._places: dict[tuple[int, int], int] = {}  # (token before or NONE, token) -> row
        self._ids = np.zeros((FIRST_CAPACITY, self._k), dtype=np.int32)
        self._shares = np.zeros((FIRST_CAPACITY, self._k), dtype=np.float32)

    @property
    def num_rows(self) -> int:
        return len(self._places)

    def write(
        self,
        before: Sequence[int],
        tokens: Sequence[int],
        ids: Sequence[Sequence[int]],
        logits: Sequence[Sequence[float]],
    ) -> None:
        """Write rows of tokens, and of pairs with the token before (NONE: none); of equal keys the last one wins.

        `ids` are the likeliest tokens after each, k or more, and `logits` theirs.
        """
        if not tokens:
            return
        newest = {(NONE, token): index for index, token in enumerate(tokens)}
        pairs = zip(before, tokens, strict=True)
        newest |= {pair: index for index, pair in enumerate(pairs) if pair[0] != NONE}
        rows = list(newest.values())
        places = [self._places.setdefault(key, len(self._places)) for key in newest]
        self._make_room()
        new_ids = np.array([row[: self._k] for row in ids], dtype=np.int32)
        self._ids[places] = new_ids[rows]
        self._shares[places] = softmax(np.array([row[: self._k] for row in logits]))[rows]

    def knows(self, before: int, token: int) -> bool:
        return (before, token) in self._places or (NONE, token) in self._places

    def after(self, before: int, token: int) -> Successors:
        """Return the successors of a pair, else of its token alone, the likeliest first, with their shares."""
        place = self._places.get((before, token))
        if place is None:
            place = self._places.get((NONE, token))
        if place is None:
            return []
        return list(zip(self._ids[place].tolist(), self._shares[place].tolist(), strict=True))

    def likeliest_path(self, before: int, token: int, length: int) -> list[int]:
        """Return up to `length` tokens, each the likeliest successor of those before it."""
        path: list[int] = []
        while len(path) < length and (found := self.after(before, token)):
            before, token = token, found[0][0]
            path.append(token)
        return path

    def memory(self) -> dict[str, torch.Tensor]:
        """Return a copy of the rows: keys int64 [R, 2], ids int32 [R, k], shares float32 [R, k]."""
        keys = torch.tensor(list(self._places), dtype=torch.int64).reshape(-1, 2)
        ids, shares = (torch.tensor(rows[: self.num_rows]) for rows in (self._ids, self._shares))
        return {"keys": keys, "ids": ids, "shares": shares}

    def load_memory(self, tensors: Mapping[str, torch.Tensor], vocab_size: int) -> None:
        """Load a `memory`, or raise ValueError if it does not fit."""
        check_names(tensors, self.memory())
        keys, ids, shares = (tensors[name].cpu() for name in ("keys", "ids", "shares"))
        wanted = [(torch.int64, (len(keys), 2))]
        wanted += [(torch.int32, (len(keys), self._k)), (torch.float32, (len(keys), self._k))]
        found = [(tensor.dtype, tuple(tensor.shape)) for tensor in (keys, ids, shares)]
        if found != wanted:
            raise ValueError(f"matrix: got keys, ids and shares {found}; allowed: {wanted}")
        if len(keys) and not (
            0 <= int(ids.min()) <= int(ids.max()) < vocab_size
            and bool(((shares >= 0) & (shares <= 1)).all())
            and int(keys.min()) >= NONE
            and len(torch.unique(keys, dim=0)) == len(keys)
        ):
            raise ValueError(
                f"matrix: holds ids outside the vocabulary 0 to {vocab_size - 1}, shares outside 0 to 1, "
                "or a key twice; save it again"
            )
        self.clear()
        self._places = {(key[0], key[1]): place for place, key in enumerate(keys.tolist())}
        self._make_room()
        self._ids[: len(keys)], self._shares[: len(keys)] = ids.numpy(), shares.numpy()

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows; their keys come on top."""
        return self.num_rows * self._k * (self._ids.itemsize + self._shares.itemsize)

    def _make_room(self) -> None:
        while len(self._ids) < self.num_rows:
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._shares = np.concatenate((self._shares, np.zeros_like(self._shares)))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits [R, k] among the k."""
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: np.ndarray = exponentials / exponentials.sum(axis=1, keepdims=True)
    return shares
