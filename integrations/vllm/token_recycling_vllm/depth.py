"""Chooses how many tokens to draft for each request, from the measured cost of a step.

Every drafted token adds a row to the step of the whole batch. In a large batch rows cost what they
compute, and a guess pays only if it is likely; alone, a row is nearly free.
"""

from __future__ import annotations

import numpy as np

# Steps without any draft after which one is drafted to learn what a row costs.
LONGEST_REST = 64
# Drafting must promise this factor more tokens a millisecond than not drafting.
MARGIN = 1.01
# Share of what is known that is kept after a step.
_KEPT = 0.99
# Before anything is measured: shares of a step's time that do not depend on its size, that a request
# costs, and that a row costs.
_FIRST_GUESS = np.array([0.9, 0.05, 0.03])
# Steps that the first guess counts for.
_PRIOR_STRENGTH = 1.0
# A step that takes this many times as long as expected was disturbed, and is not learned.
_OUTLIER = 4.0


class StepCost:
    """Milliseconds of a step, a + b * requests + c * rows, fitted to the newest steps."""

    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._prior: np.ndarray | None = None
        self._fit = _FIRST_GUESS

    def learn(self, num_requests: int, num_rows: int, milliseconds: float) -> None:
        """Add a step that decoded `num_requests` requests, with `num_rows` rows of logits."""
        if self._prior is None:
            known = _FIRST_GUESS @ (1.0, num_requests, num_rows)
            self._prior = _FIRST_GUESS * (milliseconds / known)
        elif milliseconds > _OUTLIER * self.of(num_requests, num_rows):
            return
        step = np.array([1.0, num_requests, num_rows])
        self._products = _KEPT * self._products + np.outer(step, step)
        self._sums = _KEPT * self._sums + step * milliseconds
        strength = _PRIOR_STRENGTH * np.eye(3)
        fit = np.linalg.solve(self._products + strength, self._sums + strength @ self._prior)
        self._fit = np.maximum(fit, 1e-3 * self._prior)

    def of(self, num_requests: int, num_rows: int | np.ndarray) -> float | np.ndarray:
        """Return the milliseconds of a step; only their ratios mean something before one was measured."""
        fixed, of_request, of_row = self._fit
        return fixed + of_request * num_requests + of_row * num_rows


class DepthChooser:
    """Chooses the lengths of the drafts of a batch; if not `is_auto`, all guesses are drafted."""

    def __init__(self, is_auto: bool) -> None:
        self.cost = StepCost()
        self._is_auto = is_auto
        self._num_rested = 0

    def floor(self, num_requests: int) -> float:
        """Return the probability below which a token of a batch cannot pay."""
        if not self._is_auto:
            return 0.0
        fixed, one_more = (self.cost.of(num_requests, num_requests + more) for more in (0, 1))
        return float(num_requests * (one_more - fixed) / fixed)

    def lengths(self, probabilities: np.ndarray) -> np.ndarray:
        """Return how many tokens to draft for each request, [B].

        Args:
            probabilities: that a token and all before it are emitted, falling along each row, [B, K].
        """
        if not self._is_auto:
            return (probabilities > 0).sum(axis=1)
        gains = np.sort(probabilities[probabilities > 0])[::-1]
        if not len(gains):
            return np.zeros(len(probabilities), dtype=np.int64)
        num_requests = len(probabilities)
        rows = num_requests + np.arange(len(gains) + 1)
        tokens = num_requests + np.concatenate(([0.0], np.cumsum(gains)))
        rate = tokens / self.cost.of(num_requests, rows)
        best = int(rate.argmax())
        if rate[best] < MARGIN * rate[0]:
            best = 0
        if best == 0:
            self._num_rested += 1
            if self._num_rested <= LONGEST_REST:
                return np.zeros(num_requests, dtype=np.int64)
            best = min(num_requests, len(gains))
        self._num_rested = 0
        # Ties at the smallest gain may draft a few tokens more.
        return (probabilities >= gains[best - 1]).sum(axis=1)
