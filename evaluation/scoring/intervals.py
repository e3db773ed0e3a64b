"""Confidence intervals: how much a figure may vary with the questions or texts that were drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
# Below it an error is that of the sums.
ROUNDING = 1e-12
# Below it no interval keeps its word: of 5 questions one of 95% is already about as wide as most speed-ups.
LEAST_QUESTIONS = 5
TOO_FEW = f"fewer than {LEAST_QUESTIONS} questions: no interval and no verdict"


class Interval(NamedTuple):
    """An interval, of 95% unless said; NaN twice where there is none."""

    low: float
    high: float

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.low)

    @property
    def excludes_one(self) -> bool:
        """Whether a ratio with this interval differs from 1."""
        return self.low > 1 or self.high < 1


UNKNOWN = Interval(math.nan, math.nan)


class RatioOfSums(NamedTuple):
    """A figure that is a product of sums over questions, divided by others, such as the ratio of two rates.

    Attributes:
        over: what is summed above the line, each [Q]: one entry a question, all questions in one order.
        under: what is summed below it, as many.
    """

    over: Sequence[np.ndarray]
    under: Sequence[np.ndarray]

    @classmethod
    def of_rates(
        cls,
        tokens: np.ndarray,
        seconds: np.ndarray,
        base_tokens: np.ndarray,
        base_seconds: np.ndarray,
    ) -> RatioOfSums:
        """Return the ratio of two rates, each weighted by tokens: sums before quotients."""
        return cls((tokens, base_seconds), (seconds, base_tokens))

    @property
    def value(self) -> float:
        """The figure; NaN if a sum below the line is 0."""
        over = math.prod(float(part.sum()) for part in self.over)
        under = math.prod(float(part.sum()) for part in self.under)
        return over / under if under else math.nan


def paired_interval(ratio: RatioOfSums, confidence: float = CONFIDENCE) -> Interval:
    """Return the interval of a figure over questions, drawn in pairs: a drawn question counts for both methods.

    It is the symmetric bootstrap-t interval of the logarithm (Hall, 1988, "On symmetric bootstrap confidence
    intervals"): each draw's deviation is divided by its own standard error. With few questions, percentile and
    BCa intervals are too narrow (of 5 questions they cover 80%); a test simulates the coverage of this one. The
    draws are the same at every call. It is unknown for fewer than `LEAST_QUESTIONS` questions.
    """
    samples = np.stack([*ratio.over, *ratio.under]).astype(float)
    num_questions = samples.shape[1]
    if num_questions < LEAST_QUESTIONS or not ratio.value > 0:
        return UNKNOWN
    signs = np.repeat([1.0, -1.0], [len(ratio.over), len(ratio.under)])
    apart = samples / samples.mean(axis=1)[:, None] - 1.0
    # By linearisation, of the logarithm.
    error = float((signs @ apart).std(ddof=1)) / math.sqrt(num_questions)
    if error < ROUNDING:  # every question has the same ratio
        return Interval(ratio.value, ratio.value)
    shares = _shares(num_questions)
    # [draws, S]: the sums of each draw, relative to those of all questions.
    drawn = 1.0 + shares @ apart.T
    with np.errstate(divide="ignore", invalid="ignore"):  # a draw of one question has no error
        shift = np.log(drawn) @ signs
        weights = signs / drawn
        influence = weights @ apart  # [draws, Q], by linearisation
        mean = (weights * (drawn - 1.0)).sum(axis=1)
        variance = (shares * influence**2).sum(axis=1) - mean**2
        deviations = np.abs(shift) / np.sqrt(variance / (num_questions - 1))
    deviations[np.isnan(deviations)] = np.inf
    reach = float(np.quantile(deviations, confidence, method="higher")) * error
    return Interval(ratio.value * math.exp(-reach), ratio.value * math.exp(min(reach, 700.0)))


@lru_cache(maxsize=4)
def _shares(num_questions: int) -> np.ndarray:
    """Return the share of each question in each draw, [draws, Q]; the same at every call."""
    draws = np.random.default_rng(0).integers(0, num_questions, (NUM_RESAMPLES, num_questions))
    counts = np.zeros((NUM_RESAMPLES, num_questions))
    np.add.at(counts, (np.arange(NUM_RESAMPLES)[:, None], draws), 1.0)
    return counts / num_questions


def proportion_interval(num_hits: int, num_trials: int) -> Interval:
    """Return Clopper and Pearson's exact interval of a probability, unknown without a trial."""
    if not num_trials:
        return UNKNOWN
    from scipy import stats  # imported late: it takes longer than all else here

    found = stats.binomtest(num_hits, num_trials).proportion_ci(CONFIDENCE, method="exact")
    return Interval(float(found.low), float(found.high))
