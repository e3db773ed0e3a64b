"""The tokens written most often: what to draft where nothing else is known.

Few of them are accepted, but a verified node brings a row, so that a budget of nodes that is not
filled is wasted.
"""

from __future__ import annotations

import torch

NUM_TOKENS = 8


class FrequentTokens:
    """Counts of emitted tokens; C++ counts, and ranks them.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self._counts = torch.zeros(vocab_size, dtype=torch.int32, device="cpu")

    def reset(self) -> None:
        """Forget everything."""
        self._counts.zero_()

    def state(self) -> torch.Tensor:
        """Return the counts, int32 [V], to read and write."""
        return self._counts

    def check_state(self, counts: torch.Tensor) -> None:
        """Raise ValueError if this is not what `state` returns."""
        if counts.shape != self._counts.shape or counts.dtype != self._counts.dtype:
            raise ValueError(
                f"matrix: got counts {counts.dtype} of shape {list(counts.shape)}; allowed: "
                f"{self._counts.dtype} of shape {list(self._counts.shape)}"
            )
        if int(counts.min()) < 0:
            raise ValueError("matrix: holds counts below 0")

    def load_state(self, counts: torch.Tensor) -> None:
        """Take over what `state` returned and `check_state` allows."""
        self._counts.copy_(counts)
