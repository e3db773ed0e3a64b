"""Rows of likely next tokens, found by the last one, two or three tokens of their context.

A fixed-size hash table: a row overwrites whatever its slot held, so that memory is bounded and the
newest row wins. A stored key tells a hit from a collision. A row's entry holds a token and a code in
one number, so that a lookup is one short list.

Shapes: S slots, k entries in a row, N contexts written at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

LONGEST_KEY = 3
# An entry is token * NUM_CODES + code.
NUM_CODES = 32
# Multipliers of a multiplicative hash, odd and random; one for every token of a key.
FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
WORD = 2**64 - 1


class RowTables:
    """The rows of all three lengths of key, in one table.

    Args:
        num_slots: slots S, a power of two.
        k: entries in a row.
    """

    def __init__(self, num_slots: int, k: int) -> None:
        self._last_slot = num_slots - 1
        # A key is the hash itself, 64 bits, of which the lowest choose the slot. 0: empty.
        self._keys = np.zeros(num_slots, dtype=np.uint64)
        self._rows = np.zeros((num_slots, k), dtype=np.int32)
        self._key_at = memoryview(self._keys.data)  # reads one key in a third of numpy's time

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return self._keys.nbytes + self._rows.nbytes

    def find(self, context: Sequence[int]) -> list[list[int]]:
        """Return the rows known for the end of a context, the shortest key first; k entries each."""
        rows = []
        key = 0
        for place, factor in enumerate(FACTORS[: len(context)], start=1):
            key = ((key ^ (context[-place] + place)) * factor) & WORD
            key ^= key >> 29
            slot = key & self._last_slot
            if self._key_at[slot] == key:
                rows.append(self._rows[slot].tolist())
        return rows

    def write(self, contexts: np.ndarray, tokens: np.ndarray, codes: np.ndarray) -> None:
        """Write rows under all lengths of key; of equal contexts the last one wins.

        Args:
            contexts: int64 [N, 3], the last token in the last column; -1 before the text's begin.
            tokens: int32 [N, k].
            codes: int32 [N, k], below `NUM_CODES`.
        """
        keys = np.empty((LONGEST_KEY, len(contexts)), dtype=np.uint64)
        words = contexts.astype(np.uint64)
        key = np.zeros(len(contexts), dtype=np.uint64)
        for place, factor in enumerate(FACTORS, start=1):
            key = (key ^ (words[:, -place] + np.uint64(place))) * np.uint64(factor)
            key ^= key >> np.uint64(29)
            keys[place - 1] = key
        slots = (keys & np.uint64(self._last_slot)).astype(np.int64)  # [3, N]
        self._keys[slots] = keys
        self._rows[slots] = tokens * NUM_CODES + codes

    def reset(self) -> None:
        """Forget everything."""
        self._keys.fill(0)
        self._rows.fill(0)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the keys as int64 [S] and the rows as int32 [S, k]."""
        return {
            "keys": torch.from_numpy(self._keys.view(np.int64)),
            "rows": torch.from_numpy(self._rows),
        }

    def load_memory(self, tensors: Mapping[str, torch.Tensor], vocab_size: int) -> None:
        """Take over what `memory` returned.

        Raises:
            ValueError: if shapes, types or values do not fit.
        """
        own = self.memory()
        for name, tensor in own.items():
            given = tensors[name]
            if given.shape != tensor.shape or given.dtype != tensor.dtype:
                raise ValueError(
                    f"matrix: got {name} {given.dtype} of shape {list(given.shape)}; allowed: "
                    f"{tensor.dtype} of shape {list(tensor.shape)} (--table-bits, --output-id-topk)"
                )
        entries = tensors["rows"]
        if not 0 <= int(entries.min()) <= int(entries.max()) < vocab_size * NUM_CODES:
            raise ValueError(f"matrix: holds ids outside the vocabulary 0 to {vocab_size - 1}")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
