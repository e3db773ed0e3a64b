"""Rows of likely next tokens, by the last tokens and by the model's state before them; the most frequent tokens.

A hash table of fixed size: a row overwrites whatever its slot held, so memory is bounded and the
newest row wins. The stored key distinguishes a hit from a collision. An entry of a row holds a
token and the code of its probability in one number.

A row keyed by the last one to three tokens depends on these alone; the model's state depends on the
whole context. So among the nodes verified with the same token, the one with the most similar state
before it predicts best. States are compared by their logit samples (`model.engine.read_out`), which
every pass provides.

Records, one for each verified node, form a ring of bounded memory: the newest overwrites the
oldest.

The most frequent tokens are drafted where no source knows the context. Few of them are accepted, but every verified
node gives a row, so unused nodes of the budget would be wasted.

Shapes: E records, k entries in a row, S slots of the table (or logit samples of a state), V vocabulary, N nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ...budget.best_first import CENTRES
from ...budget.memory import check_ids, check_tensor
from ...engine.read_out import sampled_ids

NUM_TOKENS = 8
LONGEST_KEY = 3
# An entry is token * NUM_CODES + code; the code of a row's first token is larger by FIRST.
NUM_CODES = 32
FIRST = len(CENTRES) + 1
assert 2 * FIRST <= NUM_CODES
# Most records, and most bytes of records and tokens: with 10 MB of row tables at the default k, the
# hybrid stays within 16 MB.
NUM_RECORDS, MOST_BYTES = 2**15, 6 * 2**20
# Per token: its latest record (8), its count (int32), and whether it is in the text (one byte).
BYTES_OF_TOKEN = 8 + 4 + 1
NOBODY = -1
# Euclidean length of a state, so that its numbers fit int8.
LENGTH = 127
# Similarity: a cosine from 0 (or below) to 1, in this many steps.
NUM_STEPS = 16
# Logits are cut at this size and rounded to 1 / LOGIT_STEPS.
LARGEST_LOGIT, LOGIT_STEPS = 1000.0, 256.0
NAMES = ("states_before", "states_after", "state_tokens", "state_rows")


class FrequentTokens:
    """Counts of emitted tokens, and the most frequent ones; C++ counts and ranks them.

    Where Python changes the counts, C++ ranks anew (`pool_reload`).
    """

    def __init__(self, vocab_size: int) -> None:
        self._counts = torch.zeros(vocab_size, dtype=torch.int32, device="cpu")
        self._ranked = np.full(NUM_TOKENS, -1, dtype=np.int32)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Counts [V] and the most frequent tokens, -1 after them, by their names in C++; writable."""
        return {"counts": self._counts.numpy(), "frequent": self._ranked}

    def reset(self) -> None:
        self._counts.zero_()

    def state(self) -> torch.Tensor:
        """Return the counts, int32 [V]."""
        return self._counts

    def check_state(self, counts: torch.Tensor) -> None:
        """Raise ValueError if these cannot be counts from `state`."""
        check_tensor("matrix: got counts", counts, self._counts.dtype, self._counts.shape)
        if int(counts.min()) < 0:
            raise ValueError("matrix: holds counts below 0")

    def load_state(self, counts: torch.Tensor) -> None:
        """Load counts that `check_state` allows."""
        self._counts.copy_(counts)


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
        self._before = np.zeros((num_records, num_probes), dtype=np.int8)
        self._after = np.zeros((num_records, num_probes), dtype=np.int8)
        self._tokens = np.zeros(num_records, dtype=np.int32)
        self._rows = np.zeros((num_records, k), dtype=np.int32)
        self._previous = np.full(num_records, NOBODY)  # last record with the same token
        self._latest = np.full(vocab_size, NOBODY)  # by token
        self._count = np.zeros(1, dtype=np.int64)  # number of all records so far

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """States before and after [E, S], tokens [E], rows [E, k], previous [E], latest [V] and the
        count [1] by their names in C++; writable.
        """
        return {
            "before": self._before,
            "after": self._after,
            "record_tokens": self._tokens,
            "record_rows": self._rows,
            "previous": self._previous,
            "latest": self._latest,
            "num_recorded": self._count,
        }

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self.arrays.values())

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
        kept: tuple[np.ndarray, ...] = (self._before, self._after, self._tokens, self._rows)
        return {
            name: torch.from_numpy(values[places]) for name, values in zip(NAMES, kept, strict=True)
        }

    def check_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError if shapes, types or values are not those of `memory`."""
        *_, tokens, rows = given = [tensors[name] for name in NAMES]
        count = tokens.numel()
        states = (count, self._before.shape[1])
        shapes = (states, states, (count,), (count, self._rows.shape[1]))
        dtypes = (torch.int8, torch.int8, torch.int32, torch.int32)
        for name, tensor, shape, dtype in zip(NAMES, given, shapes, dtypes, strict=True):
            check_tensor(f"matrix: got {name}", tensor, dtype, shape, " (output_id_topk)")
        if count > self._num_records:
            raise ValueError(
                f"matrix: got {count} states; allowed: {self._num_records} (neighbours)"
            )
        vocab_size = len(self._latest)
        check_ids(tokens, vocab_size)
        check_entries(rows, vocab_size)

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a `memory` that `check_memory` allows."""
        self.reset()
        count = len(tensors[NAMES[0]])
        kept: tuple[np.ndarray, ...] = (self._before, self._after, self._tokens, self._rows)
        for name, values in zip(NAMES, kept, strict=True):
            values[:count] = tensors[name].numpy()
        for number, token in enumerate(self._tokens[:count].tolist()):
            self._previous[number], self._latest[token] = self._latest[token], number
        self._count[0] = count
