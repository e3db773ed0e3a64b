"""Datastores: the tokens of a corpus and their suffix array, in a file that is mapped, not read.

A suffix array holds where each suffix begins, in alphabetical order of the suffixes: all places of a
string are neighbours, found by bisection.

Documents are separated by a token that no text holds, so that no match and no draft crosses from one
to the next.

Shapes: n tokens of the corpus, M matches, L tokens of a continuation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from ...machine.files import atomic_write, refuse_lfs_pointer, written_state

BOUNDARY = -1
BUILD = "build one with python -m scripts.build_datastore"


class Datastore:
    """A read-only datastore, shared by all drafters: the tokens of a corpus and their suffix array, int32 [2, n].

    Raises:
        ValueError: if the arrays are of another kind, or hold places outside the corpus.
    """

    def __init__(self, arrays: np.ndarray) -> None:
        if arrays.dtype != np.int32 or arrays.ndim != 2 or len(arrays) != 2 or not arrays.size:
            raise ValueError(f"is not a datastore; {BUILD}")
        self.tokens, self.suffixes = np.asarray(arrays)
        if (
            self.tokens.min() < BOUNDARY
            or not 0 <= self.suffixes.min() <= self.suffixes.max() < len(self.tokens)
        ):
            raise ValueError(f"its arrays do not fit together; {BUILD}")

    @classmethod
    def build(cls, documents: Iterable[Sequence[int]]) -> Datastore:
        """Build the datastore of documents; there is at least one."""
        tokens = [token for document in documents for token in (*document, BOUNDARY)]
        array = np.array(tokens, dtype=np.int32)
        return cls(np.stack((array, suffix_array(array))))

    @property
    def largest_token(self) -> int:
        return int(self.tokens.max())

    def save(self, file: Path) -> None:
        """Save as a NumPy file; a reader sees the whole file or none."""
        with atomic_write(file) as temporary, temporary.open("wb") as out:
            np.save(out, np.stack((self.tokens, self.suffixes)), allow_pickle=False)

    @staticmethod
    def load(file: str) -> Datastore:
        """Map a saved datastore, or raise ValueError; the last one stays mapped while its file is unchanged."""
        return _loaded(file, written_state(file))

    def describe(self) -> str:
        """Return one line on its size for a log."""
        size = self.tokens.nbytes + self.suffixes.nbytes
        return f"datastore of {len(self.tokens):,} tokens: {size / 2**20:.2f} MiB, mapped"

    def find(self, string: Sequence[int], most: int) -> range:
        """Return where in the suffix array the suffixes are that begin with a string, at most so many."""
        pattern, length, tokens = list(string), len(string), self.tokens

        def beginning(start: int) -> list[int]:
            found: list[int] = tokens[start : start + length].tolist()
            return found

        first = bisect_left(self.suffixes, pattern, key=beginning)
        last = min(first + most, len(self.suffixes))
        return range(first, bisect_right(self.suffixes, pattern, first, last, key=beginning))

    def following(self, places: np.ndarray, skipped: int, length: int) -> np.ndarray:
        """Return the L tokens after the strings of `skipped` tokens that begin at M places of the suffix array.

        They are int32 [M, L], sorted if the places are neighbours; -1 after the end of a document.
        """
        starts = self.suffixes[places].astype(np.int64) + skipped
        index = starts[:, None] + np.arange(length)  # [M, L]
        found = self.tokens[np.minimum(index, len(self.tokens) - 1)]
        is_over = np.logical_or.accumulate(found == BOUNDARY, axis=1)
        return np.where(is_over, BOUNDARY, found)


def loaded_for(file: str, vocab_size: int) -> Datastore:
    """Map a saved datastore for a model with a vocabulary of this size, or raise ValueError."""
    datastore = Datastore.load(file)
    if datastore.largest_token >= vocab_size:
        raise ValueError(
            f"datastore: got {file} with token {datastore.largest_token}; allowed: 0 to {vocab_size - 1}; "
            "build it with the tokenizer of this model"
        )
    return datastore


@lru_cache(maxsize=1)
def _loaded(file: str, state: tuple[object, ...]) -> Datastore:
    refuse_lfs_pointer(file, f"datastore {file}")
    try:
        arrays = np.load(file, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ValueError(f"datastore {file}: cannot be read: {error.strerror}; {BUILD}") from error
    except (ValueError, EOFError) as error:
        raise ValueError(f"datastore {file}: is not a datastore; {BUILD}") from error
    if not isinstance(arrays, np.ndarray):
        raise ValueError(f"datastore {file}: is not a datastore; {BUILD}")
    try:
        return Datastore(arrays)
    except ValueError as error:
        raise ValueError(f"datastore {file}: {error}") from error


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Return the suffix array of tokens, int32 [n]: sorted by 1, 2, 4, ... tokens until no two are equal.

    Source: U. Manber and G. Myers, Suffix arrays, SIAM Journal on Computing 22, 1993.
    """
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    size, length = len(tokens), 1
    while True:
        # The rank of what begins `length` tokens later; 0 after the end.
        later = np.zeros(size, dtype=np.int64)
        later[:-length] = ranks[length:] + 1
        keys = ranks * (size + 1) + later
        order = np.argsort(keys, kind="stable")
        ranks[order] = np.cumsum(np.diff(keys[order], prepend=keys[order[0]]) > 0)
        if ranks[order[-1]] == size - 1:
            return order.astype(np.int32)
        length *= 2
