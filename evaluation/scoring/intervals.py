"""Confidence intervals: how much a figure may vary with the questions or texts that were drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000


class Interval(NamedTuple):
    """A 95% interval; NaN twice where there is none."""

    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        """Whether a ratio with this interval differs from 1."""
        return self.low > 1 or self.high < 1


UNKNOWN = Interval(math.nan, math.nan)


def paired_interval(
    statistic: Callable[..., np.ndarray], samples: Sequence[np.ndarray]
) -> Interval:
    """Return the percentile bootstrap interval of a figure over questions, drawn in pairs.

    It is unknown for fewer than two questions.

    Args:
        statistic: takes the samples and `axis`, the one that runs over questions; vectorised.
        samples: what was measured on each question [Q], both methods' together, so that a drawn
            question counts for both. The draws are the same at every call.
    """
    if len(samples[0]) < 2:
        return UNKNOWN
    with np.errstate(divide="ignore", invalid="ignore"):  # a draw without any token has no ratio
        found = stats.bootstrap(
            tuple(samples),
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=NUM_RESAMPLES,
            confidence_level=CONFIDENCE,
            method="percentile",
            random_state=np.random.default_rng(0),
        ).confidence_interval
    return Interval(float(found.low), float(found.high))


def ratio_of_rates(
    tokens: np.ndarray,
    seconds: np.ndarray,
    base_tokens: np.ndarray,
    base_seconds: np.ndarray,
    axis: int = -1,
) -> np.ndarray:
    """Return the ratio of two rates, each weighted by tokens: sums before quotients."""
    rate = tokens.sum(axis=axis) / seconds.sum(axis=axis)
    return rate / (base_tokens.sum(axis=axis) / base_seconds.sum(axis=axis))


def ratio_of_means(values: np.ndarray, base_values: np.ndarray, axis: int = -1) -> np.ndarray:
    return values.mean(axis=axis) / base_values.mean(axis=axis)


def proportion_interval(num_hits: int, num_trials: int) -> Interval:
    """Return Clopper and Pearson's exact interval of a probability, unknown without a trial."""
    if not num_trials:
        return UNKNOWN
    found = stats.binomtest(num_hits, num_trials).proportion_ci(CONFIDENCE, method="exact")
    return Interval(float(found.low), float(found.high))
