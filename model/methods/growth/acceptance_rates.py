"""Acceptance rates of the kinds of guesses, learned while decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .memory import check_tensor

# Most observations that a rate is averaged over.
MEMORY = 400.0


class AcceptanceRates:
    """Acceptance rates of the kinds of guesses, learned while decoding.

    Args:
        prior: the initial rate of each kind.
        strength: number of observations that the prior counts for.
        memory: most observations that a rate is averaged over; older ones fade, as the text changes.
    """

    def __init__(
        self, prior: Sequence[float], strength: float = 8.0, memory: float = MEMORY
    ) -> None:
        self._prior = tuple(prior)
        self._strength = strength
        self._memory = memory
        self.array = np.empty((2, len(self._prior)))  # rates and numbers of observations
        # A view that reads single numbers in a third of numpy's time.
        self.rates: memoryview[float] = memoryview(self.array[0].data)
        self._weights: memoryview[float] = memoryview(self.array[1].data)
        self.reset()

    def reset(self) -> None:
        self.array[:] = self._prior, [self._strength] * len(self._prior)

    def learn(self, kind: int, came_true: bool) -> None:
        """Count one guess."""
        weight = min(self._weights[kind] + 1.0, self._memory)
        self._weights[kind] = weight
        self.rates[kind] += (came_true - self.rates[kind]) / weight

    def state(self) -> torch.Tensor:
        """Return rates and numbers of observations, float64 [2, kinds]."""
        return torch.from_numpy(self.array.copy())

    def load_state(self, state: torch.Tensor) -> None:
        """Load a `state`, or raise ValueError if it does not fit."""
        check_tensor("rates: got", state, self.array.dtype, self.array.shape)
        if not bool(((state[0] >= 0) & (state[0] <= 1) & (state[1] > 0)).all()):
            raise ValueError(
                "rates: got numbers that are not rates; allowed: 0 to 1, weights above 0"
            )
        self.array[:] = state.cpu().numpy()
