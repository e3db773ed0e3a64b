"""The hybrid's tables in simple Python, for the reference of its candidate pool."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from model.methods.hybrid.candidate_pool import NUM_FREQUENT
from model.methods.hybrid.tables import (
    FIRST,
    LARGEST_LOGIT,
    LENGTH,
    LONGEST_KEY,
    NOBODY,
    NUM_CODES,
    NUM_STEPS,
    Neighbours,
    RowTables,
)
from tests.model.budget.reference_growth import probability_codes


def row_of(tokens: Sequence[int], logits: Sequence[float]) -> list[int]:
    """Return the entries of k likely next tokens, with logits in falling order."""
    entries = [
        token * NUM_CODES + code
        for token, code in zip(tokens, probability_codes(logits), strict=True)
    ]
    entries[0] += FIRST
    return entries


class ReferenceRowTables(RowTables):
    """The table of rows, with lookups."""

    def __init__(self, num_slots: int, k: int) -> None:
        super().__init__(num_slots, k)
        # Single keys and rows are read and written through these, in a third of numpy's time.
        self._key_at = memoryview(self._keys.data)
        self._entry_at = memoryview(self._rows.reshape(-1).data)  # of row r from r * k on
        self._k = k

    def find(self, context: tuple[int, ...]) -> list[list[int]]:
        """Return the rows known for the end of a context, the shortest key first; k entries each."""
        rows, k = [], self._k
        for length in range(1, 1 + min(LONGEST_KEY, len(context))):
            key = hash(context[-length:])
            slot = key & self._last_slot
            if self._key_at[slot] == key:
                rows.append(self._entry_at[slot * k : slot * k + k].tolist())
        return rows

    def write(self, context: tuple[int, ...], entries: Sequence[int]) -> None:
        """Write a row under all lengths of key.

        Args:
            context: one to three tokens, the last token last.
            entries: k, as `row_of` returns them.
        """
        row, k = array("i", entries), self._k
        for length in range(1, 1 + len(context)):
            key = hash(context[-length:])
            slot = key & self._last_slot
            self._key_at[slot] = key
            self._entry_at[slot * k : slot * k + k] = row


class ReferenceNeighbours(Neighbours):
    """Records, with lookups."""

    def __init__(self, num_compared: int, k: int, vocab_size: int) -> None:
        super().__init__(num_compared, k, vocab_size)
        self._num_compared = num_compared

    def add(self, token: int, before: np.ndarray, after: np.ndarray, row: Sequence[int]) -> None:
        """Add the record of a node: the states before and after its token [S], and its row [k]."""
        if token >= len(self._latest):  # some prompts' tokens have no logit
            return
        number = int(self._count[0])
        place = number % self._num_records
        for values, value in zip(self._kept.values(), (before, after, token, row), strict=True):
            values[place] = value
        self._previous[place], self._latest[token] = self._latest[token], number
        self._count[0] = number + 1

    def find(self, token: int, state: np.ndarray | None) -> tuple[int, int]:
        """Return the record of a token before which the state was most like a state [S]; of equal ones
        the newest.

        Returns:
            Its number, `NOBODY` if there is none, and how much alike the states are, 0 to
            `NUM_STEPS` - 1.
        """
        if state is None or token >= len(self._latest):
            return NOBODY, 0
        mine = state.astype(np.int64)
        found, highest = NOBODY, -(LENGTH**2) * 2
        number = int(self._latest[token])
        for _ in range(self._num_compared):
            if number < max(0, int(self._count[0]) - self._num_records):
                break  # overwritten since
            product = int(mine @ self._kept["states_before"][number % self._num_records])
            if product > highest:
                found, highest = number, product
            number = int(self._previous[number % self._num_records])
        return found, min(max(highest * NUM_STEPS // LENGTH**2, 0), NUM_STEPS - 1)

    def after(self, number: int) -> np.ndarray | None:
        """Return the state after a record's token [S]; None of `NOBODY`."""
        return None if number == NOBODY else self._kept["states_after"][number % self._num_records]

    def row(self, number: int) -> list[int]:
        """Return the row of a record: k entries."""
        row: list[int] = self._kept["state_rows"][number % self._num_records].tolist()
        return row


def states_of(logit_samples: torch.Tensor) -> np.ndarray:
    """Return the states of logit_samples [N, S]: their differences from the mean, in whole numbers and of length
    `LENGTH`, int8 [N, S].

    The mean carries no information, since probabilities do not depend on it, nor does a token that
    a model rules out (minus infinity). All sums are of integers.
    """
    values: np.ndarray = logit_samples.numpy()
    values = np.where(np.isfinite(values), values, np.float32(0))
    values = np.clip(values, np.float32(-LARGEST_LOGIT), np.float32(LARGEST_LOGIT))
    whole = np.rint(values).astype(np.int64)
    differences = whole * whole.shape[1] - whole.sum(axis=1, keepdims=True)
    squares = np.maximum((differences**2).sum(axis=1, keepdims=True), 1)
    scaled = differences * (LENGTH / np.sqrt(squares.astype(np.float64)))
    states: np.ndarray = np.rint(scaled).astype(np.int8)
    return states


class ReferenceFrequentTokens:
    """Counts, and the tokens written most often.

    Attributes:
        top: the most frequent tokens, at most `NUM_FREQUENT`, the most frequent first; of equals the
            larger id.
    """

    def __init__(self, vocab_size: int) -> None:
        self.counts = torch.zeros(vocab_size, dtype=torch.int32)
        self._count_of = memoryview(self.counts.numpy().data)
        self.top: list[int] = []

    def append(self, tokens: Iterable[int]) -> None:
        """Count tokens."""
        top = self.top
        for token in tokens:
            self._count_of[token] += 1
            if token not in top:
                if len(top) == NUM_FREQUENT and self._rank(token) > self._rank(top[-1]):
                    continue
                top.append(token)
            top.sort(key=self._rank)
            del top[NUM_FREQUENT:]

    def reset(self) -> None:
        """Forget everything."""
        self.counts.zero_()
        self.top = []

    def load_state(self, counts: torch.Tensor) -> None:
        """Take over the counts of another."""
        self.counts.copy_(counts)
        used = self.counts.nonzero().flatten().tolist()
        self.top = sorted(used, key=self._rank)[:NUM_FREQUENT]

    def _rank(self, token: int) -> tuple[int, int]:
        # By the counts alone, so that a run that goes on from saved counts drafts the same. Tokens with
        # small ids are bytes and marks.
        return -self._count_of[token], -token
