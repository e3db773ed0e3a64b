"""Rows of likely next tokens, by the last tokens and by the model's state before them.

A hash table of fixed size: a row overwrites whatever its slot held, so memory is bounded and the
newest row wins. The stored key distinguishes a hit from a collision. An entry of a row holds a
token and the code of its probability in one number.

A row keyed by the last one to three tokens depends on these alone; the model's state depends on the
whole context. So among the nodes verified with the same token, the one with the most similar state
before it predicts best. States are compared by their logit samples (`model.engine.read_out`), which
every pass provides.

Records, one for each verified node, form a ring of bounded memory: the newest overwrites the
oldest.

Shapes: E records, k entries in a row, S slots of the table (or logit samples of a state), V vocabulary, N nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ...budget.best_first import CENTRES
from ...budget.memory import check_ids, check_tensor
from ...engine.read_out import sampled_ids

LONGEST_KEY = 3
# An entry is token * NUM_CODES + code; the code of a row's first token is larger by FIRST.
NUM_CODES = 32
FIRST = len(CENTRES) + 1
assert 2 * FIRST <= NUM_CODES
# Most records, and most bytes of records and tokens: with 10 MiB of row tables at the default k, the
# hybrid stays within 16 MiB.
NUM_RECORDS, MOST_BYTES = 2**15, 6 * 2**20
# Per token: its latest record (8), its count (int32), and whether it is in the text (one byte).
BYTES_OF_TOKEN = 8 + 4 + 1
NOBODY = -1
# Euclidean length of a state, so that its numbers fit int8.
LENGTH = 127
# Similarity: a cosine from 0 (or below) to 1, in this many steps.
NUM_STEPS = 16
# Logit samples are cut at this size and rounded to whole numbers: more digits bring no more tokens a step.
LARGEST_LOGIT = 127.0
NAMES_IN_CPP = ("before", "after", "record_tokens", "record_rows")


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
        self.arrays: dict[str, np.ndarray] = {
            "keys": self._keys,
            "rows": self._rows,
        }  # by their names in C++
        self.num_bytes = self._keys.nbytes + self._rows.nbytes

    def reset(self) -> None:
        self._keys.fill(0)
        self._rows.fill(0)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the slots in use: U keys, int64 [U], and their rows, int32 [U, k]."""
        used = np.flatnonzero(self._keys)
        return {name: torch.from_numpy(values[used]) for name, values in self.arrays.items()}

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


class Neighbours:
    """Records of verified nodes: token, states before and after it, and row.

    Records are numbered in order; each is stored at its number modulo E. Of a token the newest `num_compared` are
    compared; 0 keeps none.
    """

    def __init__(self, num_compared: int, k: int, vocab_size: int) -> None:
        num_probes = len(sampled_ids(vocab_size))
        bytes_of_record = 2 * num_probes + 4 + 4 * k + 8
        bytes_left = MOST_BYTES - vocab_size * BYTES_OF_TOKEN - 8  # 8 for the count
        num_records = max(1, min(NUM_RECORDS, bytes_left // bytes_of_record))
        self._num_records = num_records = num_records if num_compared else 0
        self._previous = np.full(num_records, NOBODY)  # last record with the same token
        self._latest = np.full(vocab_size, NOBODY)  # by token
        self._count = np.zeros(1, dtype=np.int64)  # number of all records so far
        # Of each record, by the names in a saved memory.
        self._kept: dict[str, np.ndarray] = {
            "states_before": np.zeros((num_records, num_probes), dtype=np.int8),
            "states_after": np.zeros((num_records, num_probes), dtype=np.int8),
            "state_tokens": np.zeros(num_records, dtype=np.int32),
            "state_rows": np.zeros((num_records, k), dtype=np.int32),
        }
        self.arrays: dict[str, np.ndarray] = {  # by their names in C++
            **dict(zip(NAMES_IN_CPP, self._kept.values(), strict=True)),
            "previous": self._previous,
            "latest": self._latest,
            "num_recorded": self._count,
        }
        self.num_bytes = sum(values.nbytes for values in self.arrays.values())

    def reset(self) -> None:
        self._latest.fill(NOBODY)
        self._count[0] = 0

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the U records, the oldest first: states before and after their tokens, int8 [U, S], the
        tokens, int32 [U], and rows, int32 [U, k].
        """
        count = int(self._count[0])
        numbers = np.arange(max(0, count - self._num_records), count)
        places = numbers % max(1, self._num_records)
        return {name: torch.from_numpy(values[places]) for name, values in self._kept.items()}

    def check_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError if shapes, types or values are not those of `memory`."""
        tokens, rows = tensors["state_tokens"], tensors["state_rows"]
        count = tokens.numel()
        for name, kept in self._kept.items():
            shape = (count, *kept.shape[1:])
            dtype = f"torch.{kept.dtype}"
            check_tensor(f"matrix: got {name}", tensors[name], dtype, shape, " (output_id_topk)")
        if count > self._num_records:
            raise ValueError(
                f"matrix: got {count} states; allowed: {self._num_records} (neighbours)"
            )
        vocab_size = len(self._latest)
        check_ids(tokens, vocab_size)
        check_entries(rows, vocab_size)

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.reset()
        tokens = tensors["state_tokens"].tolist()
        for name, kept in self._kept.items():
            kept[: len(tokens)] = tensors[name].numpy()
        for number, token in enumerate(tokens):
            self._previous[number], self._latest[token] = self._latest[token], number
        self._count[0] = len(tokens)
