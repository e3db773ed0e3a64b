"""The tokens written most often: what to draft where nothing else is known.

Few of them are accepted, but a verified node brings a row, so that a budget of nodes that is not
filled is wasted.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

NUM_TOKENS = 8


class FrequentTokens:
    """Counts of emitted tokens.

    Args:
        vocab_size: V.

    Attributes:
        top: the most frequent tokens, at most `NUM_TOKENS`, the most frequent first; of equals the
            larger id.
    """

    def __init__(self, vocab_size: int) -> None:
        self._counts = torch.zeros(vocab_size, dtype=torch.int32, device="cpu")
        self._count_of = memoryview(
            self._counts.numpy().data
        )  # reads one in a third of numpy's time
        self.top: list[int] = []

    def append(self, tokens: Iterable[int]) -> None:
        """Count tokens."""
        top = self.top
        for token in tokens:
            self._count_of[token] += 1
            if token not in top:
                if len(top) == NUM_TOKENS and self._rank(token) > self._rank(top[-1]):
                    continue
                top.append(token)
            top.sort(key=self._rank)
            del top[NUM_TOKENS:]

    def reset(self) -> None:
        """Forget everything."""
        self._counts.zero_()
        self.top = []

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
        used = self._counts.nonzero().flatten().tolist()
        self.top = sorted(used, key=self._rank)[:NUM_TOKENS]

    def _rank(self, token: int) -> tuple[int, int]:
        # By the counts alone, so that a run that goes on from saved counts drafts the same. Tokens with
        # small ids are bytes and marks.
        return -self._count_of[token], -token
