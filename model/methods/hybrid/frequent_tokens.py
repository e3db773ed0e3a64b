"""The most frequent tokens, drafted where no source knows the context.

Few of them are accepted, but every verified node gives a row, so unused nodes of the budget would
be wasted.
"""

from __future__ import annotations

import numpy as np
import torch

from ..growth.memory import check_tensor

NUM_TOKENS = 8


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
