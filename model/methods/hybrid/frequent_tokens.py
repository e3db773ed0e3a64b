"""The most frequent tokens, drafted where no source knows the context.

Few of them are accepted, but every verified node gives a row, so unused nodes of the budget would
be wasted.
"""

from __future__ import annotations

import torch

from ..growth.memory import check_tensor

NUM_TOKENS = 8


class FrequentTokens:
    """Counts of emitted tokens; C++ counts and ranks them."""

    def __init__(self, vocab_size: int) -> None:
        self._counts = torch.zeros(vocab_size, dtype=torch.int32, device="cpu")

    def reset(self) -> None:
        self._counts.zero_()

    def state(self) -> torch.Tensor:
        """Return the counts, int32 [V], writable."""
        return self._counts

    def check_state(self, counts: torch.Tensor) -> None:
        """Raise ValueError if these cannot be counts from `state`."""
        check_tensor("matrix: got counts", counts, self._counts.dtype, self._counts.shape)
        if int(counts.min()) < 0:
            raise ValueError("matrix: holds counts below 0")

    def load_state(self, counts: torch.Tensor) -> None:
        """Load counts that `check_state` allows."""
        self._counts.copy_(counts)
