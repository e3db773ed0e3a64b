"""Acceptance of guesses, learned while decoding: rates by kind, how far a chain is right, and when to try again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from operator import mul

import numpy as np
import torch

from ..engine.budget import CostCurve
from .memory import check_tensor

# Most observations that a rate is averaged over.
MEMORY = 400.0
# Initial share of right guesses; soon replaced by observations.
PRIOR = 0.5
# Steps without a draft before a new try: at first and, doubled after every failed try, at most.
FIRST_WAIT, LONGEST_WAIT = 100, 1600


class AcceptanceRates:
    """Acceptance rates of the kinds of guesses, learned while decoding.

    Each begins with its prior, which counts for `strength` observations, and is averaged over at most `memory` of
    them: older ones fade, as the sequence changes.
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


class ChainAcceptance:
    """For every kind of chain, such as the length of the match before it, and place in a chain of at most `length`:
    how often that guess is right if all before it were.
    """

    def __init__(self, num_kinds: int, length: int) -> None:
        self._num_kinds, self._length = num_kinds, length
        self._rates = AcceptanceRates([PRIOR] * (num_kinds * length))

    def paying(self, kind: int, length: int, cost_curve: CostCurve) -> int:
        """Return the best number of guesses for a chain of this kind, at most `length`."""
        return cost_curve.best_size(self._gains(kind, length))

    def gains(self, kind: int, length: int, least: float) -> list[float]:
        """Return the probability that each guess of a chain is accepted, in falling order, none below `least`."""
        return [*takewhile(lambda gain: gain >= least, self._gains(kind, length))]

    def learn(self, kind: int, guess: Sequence[int], tokens: Sequence[int]) -> None:
        """Compare a chain with the emitted tokens."""
        first = self._first(kind)
        for place, (guessed, token) in enumerate(zip(guess, tokens, strict=False)):
            self._rates.learn(first + place, guessed == token)
            if guessed != token:
                break

    def reset(self) -> None:
        self._rates.reset()

    def _gains(self, kind: int, length: int) -> Iterator[float]:
        first = self._first(kind)
        return accumulate(self._rates.rates[first : first + length], mul)

    def _first(self, kind: int) -> int:
        return min(kind, self._num_kinds - 1) * self._length


class Backoff:
    """Decides before every step whether it drafts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget failed tries."""
        self._num_skipped = 0
        self._wait = FIRST_WAIT

    @property
    def is_waiting(self) -> bool:
        """Whether drafts did not pay at the last decision."""
        return self._num_skipped > 0 or self._wait > FIRST_WAIT

    def allow(self, pays: bool) -> bool:
        """Return whether the current step drafts: if that pays and, now and then, if it does not."""
        if pays:
            self.reset()
            return True
        if self._num_skipped < self._wait:
            self._num_skipped += 1
            return False
        self._num_skipped = 0
        self._wait = min(2 * self._wait, LONGEST_WAIT)
        return True
