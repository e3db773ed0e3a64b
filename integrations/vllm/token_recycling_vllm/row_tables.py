"""Rows of likely next tokens, by the last one, two and three tokens: the drafter's memory.

The rows of single tokens are Token Recycling's adjacency matrix (arXiv 2408.08696, section 3.1). A
written row is half the old and half the new one. Rows of two and three tokens are overwritten; they
live in a hash table of fixed size, where the newest row wins a slot.

Shapes: B contexts, R rows, k successors in a row, V vocabulary.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

LONGEST = 3
NO_TOKEN = -1
# A key is the sum of a text's number, the length and the last tokens, each times an odd factor, mixed
# as in MurmurHash3's finaliser (public domain).
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
_LENGTHS = np.array([1, 2, 3], dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
_OF_TEXT, _MIX = np.uint64(0xA0761D6478BD642F), np.uint64(0xFF51AFD7ED558CCD)
_NO_KEY = -1


class RowTables:
    """The rows for contexts of one to three tokens.

    Args:
        vocab_size, k: V and k.
        table_bits: log2 of the slots of the hash table.
        share: whether all texts share their rows. If not, a text's number is part of its keys, and
            single tokens have a hash table, too.
    """

    def __init__(self, vocab_size: int, k: int, table_bits: int, share: bool) -> None:
        self._vocab_size = vocab_size
        self._share = share
        self._mask = 2**table_bits - 1
        # Slots of single tokens, and behind them those of longer contexts.
        self._num_single = vocab_size if share else 2**table_bits
        num_slots = self._num_single + 2**table_bits
        self._keys = np.full(num_slots, _NO_KEY, dtype=np.int64)
        self._successors = np.zeros((num_slots, k), dtype=np.int32)
        self._shares = np.zeros((num_slots, k), dtype=np.float32)

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._successors.nbytes + self._shares.nbytes

    def read(
        self, contexts: np.ndarray, text_numbers: np.ndarray, num_ranks: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the likeliest successors by one, two and three tokens, and their shares, 0 where there is no row.

        Args:
            contexts: last tokens, the newest last; NO_TOKEN before the text's begin, [B, LONGEST].
            text_numbers: number of each context's text, [B].
            num_ranks: successors of a row; the arrays are [B, LONGEST, num_ranks].
        """
        keys, slots = self._places(contexts, text_numbers)
        is_found = (self._keys[slots] == keys) & (keys != _NO_KEY)
        shares = self._shares[slots, :num_ranks] * is_found[:, :, None]
        return self._successors[slots, :num_ranks], shares

    def write(
        self,
        contexts: np.ndarray,
        text_numbers: np.ndarray,
        successors: np.ndarray,
        shares: np.ndarray,
    ) -> None:
        """Write the row of each context [R, LONGEST]; of equal contexts the last one wins.

        A row has the likeliest tokens, the likeliest first, and their shares, both [R, k].
        """
        keys, slots = self._places(contexts, text_numbers)
        rows, lengths = np.nonzero(keys[:, 1:] != _NO_KEY)
        self._put(keys[rows, lengths + 1], slots[rows, lengths + 1], successors[rows], shares[rows])
        # The newest of each token is averaged with what it was before this step.
        _, places = np.unique(keys[::-1, 0], return_index=True)
        places = len(keys) - 1 - places
        places = places[keys[places, 0] != _NO_KEY]
        single, slots = keys[places, 0], slots[places, 0]
        old = self._shares[slots] * (self._keys[slots] == single)[:, None]
        mean = averaged(self._successors[slots], old, successors[places], shares[places])
        self._put(single, slots, *mean)

    def save(self, file: Path) -> None:
        """Save the adjacency matrix, as the library's `recycling-averaged` does; raises OSError.

        A reader sees the whole file or none.
        """
        from safetensors.numpy import save_file

        matrix = slice(self._num_single)
        temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        tensors = {"adjacency": self._successors[matrix], "shares": self._shares[matrix]}
        save_file(tensors, temporary)
        os.replace(temporary, file)

    def load(self, file: Path) -> None:
        """Load an adjacency matrix that was saved here or by the library.

        Raises:
            ValueError: if it does not fit the vocabulary and k.
            OSError, SafetensorError: if the file cannot be read.
        """
        from safetensors.numpy import load_file

        tensors = load_file(file)
        if set(tensors) != {"adjacency", "shares"}:
            raise ValueError(
                f"load_matrix {file}: got tensors {', '.join(sorted(tensors))}; allowed: adjacency, shares "
                "(the method recycling-averaged)"
            )
        ids, shares = tensors["adjacency"], tensors["shares"]
        shape = (self._vocab_size, self._shares.shape[1])
        if ids.shape != shape or shares.shape != shape:
            raise ValueError(
                f"load_matrix {file}: got shapes {list(ids.shape)} and {list(shares.shape)}; allowed: "
                f"{list(shape)} (vocabulary of the model, top_k)"
            )
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise ValueError(f"load_matrix {file}: holds ids outside 0 to {self._vocab_size - 1}")
        if not ((shares >= 0) & (shares <= 1)).all():
            raise ValueError(f"load_matrix {file}: holds shares outside 0 to 1")
        tokens = np.flatnonzero(shares.any(axis=1))
        self._put(tokens, tokens, ids[tokens], shares[tokens])

    def _put(
        self, keys: np.ndarray, slots: np.ndarray, successors: np.ndarray, shares: np.ndarray
    ) -> None:
        self._keys[slots], self._successors[slots], self._shares[slots] = keys, successors, shares

    def _places(
        self, contexts: np.ndarray, text_numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and slots by one, two and three tokens, int64 [B, LONGEST].

        The key is _NO_KEY where a context is too short, or its last token has no logit.
        """
        newest_first = contexts[:, ::-1]
        mixed = np.cumsum(newest_first.astype(np.uint64) * _FACTORS, axis=1) + _LENGTHS
        mixed += (text_numbers.astype(np.uint64) * _OF_TEXT)[:, None]
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _MIX
        keys = ((mixed ^ (mixed >> np.uint64(29))) >> np.uint64(1)).astype(np.int64)
        slots = keys & self._mask
        slots[:, 1:] += self._num_single
        last = newest_first[:, 0]
        is_outside = (last < 0) | (last >= self._vocab_size)  # some prompts' tokens have no logit
        if self._share:
            keys[:, 0] = last
            slots[:, 0] = np.where(is_outside, 0, last)
        keys[(newest_first < 0) | is_outside[:, None]] = _NO_KEY
        return keys, slots


def averaged(
    old_ids: np.ndarray, old_shares: np.ndarray, ids: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k successors with the largest sum of old and new share, and their shares, each [R, k].

    Old shares are 0 where there was no row.
    """
    is_known = (ids[:, :, None] == old_ids[:, None, :]) & (old_shares > 0)[:, None, :]  # [R, k, k]
    old = old_shares + (is_known * shares[:, :, None]).sum(axis=1)
    new = np.where(is_known.any(axis=2), np.float32(0), shares)
    all_ids = np.concatenate((old_ids, ids), axis=1)  # [R, 2k]
    all_shares = np.concatenate((old, new), axis=1)
    order = np.argsort(-all_shares, axis=1, kind="stable")[:, : ids.shape[1]]
    largest = np.take_along_axis(all_shares, order, axis=1)
    return np.take_along_axis(all_ids, order, axis=1), largest / largest.sum(axis=1, keepdims=True)
