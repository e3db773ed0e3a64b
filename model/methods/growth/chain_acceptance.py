"""Learned acceptance of chains: how far a chain of guesses is right, and which length pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from operator import mul

from ...engine.budget import CostCurve
from .acceptance_rates import AcceptanceRates

# Initial share of right guesses; soon replaced by observations.
PRIOR = 0.5


class ChainAcceptance:
    """For every kind of chain and place in it: how often that guess is right if all before it were.

    Args:
        num_kinds: number of kinds of chains, such as lengths of the match before them.
        length: length of the longest chain.
    """

    def __init__(self, num_kinds: int, length: int) -> None:
        self._num_kinds = num_kinds
        self._length = length
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
