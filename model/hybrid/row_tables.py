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


class RowTables:
    """The rows of all three lengths of key, in one table.

    Args:
        num_slots: slots S, a power of two.
        k: entries in a row.
    """

    def __init__(self, num_slots: int, k: int) -> None:
        self._last_slot = num_slots - 1
        # A key is Python's hash of a tuple of tokens, 64 bits, the same in every process; its lowest
        # bits choose the slot. 0: empty.
        self._keys = np.zeros(num_slots, dtype=np.int64)
        self._rows = np.zeros((num_slots, k), dtype=np.int32)
        self._key_at = memoryview(self._keys.data)  # reads one key in a third of numpy's time

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return self._keys.nbytes + self._rows.nbytes

    def find(self, context: tuple[int, ...]) -> list[list[int]]:
        """Return the rows known for the end of a context, the shortest key first; k entries each."""
        rows = []
        for length in range(1, 1 + min(LONGEST_KEY, len(context))):
            key = hash(context[-length:])
            slot = key & self._last_slot
            if self._key_at[slot] == key:
                rows.append(self._rows[slot].tolist())
        return rows

    def write(
        self, contexts: Sequence[tuple[int, ...]], tokens: np.ndarray, codes: np.ndarray
    ) -> None:
        """Write rows under all lengths of key; of equal contexts the last one wins.

        Args:
            contexts: N, of one to three tokens, the last token last.
            tokens: int32 [N, k].
            codes: int32 [N, k], below `NUM_CODES`.
        """
        keys, sources = [], []
        for index, context in enumerate(contexts):
            for length in range(1, 1 + len(context)):
                keys.append(hash(context[-length:]))
                sources.append(index)
        hashes = np.array(keys, dtype=np.int64)  # [up to 3 N]
        slots = hashes & self._last_slot
        self._keys[slots] = hashes
        self._rows[slots] = (tokens * NUM_CODES + codes)[sources]

    def reset(self) -> None:
        """Forget everything."""
        self._keys.fill(0)
        self._rows.fill(0)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the keys as int64 [S] and the rows as int32 [S, k]."""
        return {
            "keys": torch.from_numpy(self._keys),
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
