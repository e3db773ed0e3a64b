"""Rows of likely next tokens, found by the last one, two or three tokens of their context.

A hash table of fixed size: a row overwrites whatever its slot held, so memory is bounded and the
newest row wins. The stored key distinguishes a hit from a collision. An entry of a row holds a
token and the code of its probability in one number.

Shapes: S slots, k entries in a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..growth.best_first import CENTRES
from ..growth.memory import check_ids, check_tensor

LONGEST_KEY = 3
# An entry is token * NUM_CODES + code; the code of a row's first token is larger by FIRST.
NUM_CODES = 32
FIRST = len(CENTRES) + 1
assert 2 * FIRST <= NUM_CODES


def check_entries(rows: torch.Tensor, vocab_size: int) -> None:
    """Raise ValueError if an entry of rows [rows, k] has a token outside the vocabulary or an invalid code."""
    # Rounded down, as a negative entry's token is.
    check_ids(rows // NUM_CODES, vocab_size)
    if rows.numel() and int((rows % NUM_CODES).max()) >= 2 * FIRST:
        raise ValueError(f"matrix: holds a code above {2 * FIRST - 1}")


class RowTables:
    """The rows for keys of all three lengths, in one table; S is a power of two."""

    def __init__(self, num_slots: int, k: int) -> None:
        self._last_slot = num_slots - 1
        # A key is Python's 64-bit hash of a tuple of tokens, the same in every process; its lowest
        # bits choose the slot. 0: empty.
        self._keys = np.zeros(num_slots, dtype=np.int64)
        self._rows = np.zeros((num_slots, k), dtype=np.int32)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Keys [S] and rows [S, k] by their names in C++, writable."""
        return {"keys": self._keys, "rows": self._rows}

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._rows.nbytes

    def reset(self) -> None:
        self._keys.fill(0)
        self._rows.fill(0)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the slots in use: U keys, int64 [U], and their rows, int32 [U, k]."""
        used = np.flatnonzero(self._keys)
        return {
            "keys": torch.from_numpy(self._keys[used]),
            "rows": torch.from_numpy(self._rows[used]),
        }

    def check_memory(self, tensors: Mapping[str, torch.Tensor], vocab_size: int) -> None:
        """Raise ValueError if shapes, types or values are not those of `memory`."""
        keys, rows = tensors["keys"], tensors["rows"]
        shape, hint = (keys.numel(), self._rows.shape[1]), " (output_id_topk)"
        check_tensor("matrix: got keys", keys, torch.int64, shape[:1], hint)
        check_tensor("matrix: got rows", rows, torch.int32, shape, hint)
        check_entries(rows, vocab_size)

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a `memory` that `check_memory` allows; from a larger table, as many rows as find a slot."""
        self.reset()
        keys = tensors["keys"].numpy()
        slots = keys & self._last_slot
        self._keys[slots] = keys
        self._rows[slots] = tensors["rows"].numpy()
