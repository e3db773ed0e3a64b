"""Intervals keep their word: a simulation counts how often they hold the true figure.

Run: pytest tests/evaluation/scoring/test_intervals.py
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from evaluation.scoring.intervals import (
    CONFIDENCE,
    LEAST_QUESTIONS,
    UNKNOWN,
    Interval,
    RatioOfSums,
    joint_confidence,
    paired_interval,
)

# Questions of a population: the ratio of the whole of it is the true figure.
POPULATION = 100_000
# Of answers of the demo model on a CPU the logarithms of the questions' speed-ups have standard deviations
# from 0.1 (suffix) to 0.4 (EAGLE-3).
SPREAD = 0.25


def _of_rates(
    tokens: np.ndarray, seconds: np.ndarray, base_tokens: np.ndarray, base_seconds: np.ndarray
) -> RatioOfSums:
    """The ratio of two rates, each weighted by tokens: sums before quotients."""
    return RatioOfSums((tokens, base_seconds), (seconds, base_tokens))


def _population(random: np.random.Generator, spread: float = SPREAD) -> RatioOfSums:
    """Questions of many lengths, with prompts, whose speed-ups are skewed to the right."""
    tokens = np.minimum(128, 4 + random.gamma(1.5, 40, POPULATION).astype(int))
    base_seconds = 0.05 + random.gamma(2, 0.02, POPULATION) + 0.004 * tokens
    speedup = np.exp(random.normal(0.3, spread, POPULATION)) + random.exponential(
        spread, POPULATION
    )
    return _of_rates(tokens, base_seconds / speedup, tokens, base_seconds)


@pytest.mark.parametrize(("num_questions", "num_trials"), [(5, 1500), (20, 1000), (120, 400)])
def test_an_interval_of_95_percent_holds_the_true_figure_in_95_percent(
    num_questions: int, num_trials: int
) -> None:
    random = np.random.default_rng(num_questions)
    population = _population(random)
    num_held = 0
    for _ in range(num_trials):
        drawn = random.integers(0, POPULATION, num_questions)
        low, high = paired_interval(
            RatioOfSums(
                [part[drawn] for part in population.over],
                [part[drawn] for part in population.under],
            )
        )
        num_held += low <= population.value <= high
    assert 0.93 <= num_held / num_trials <= 0.97


@pytest.mark.parametrize("num_methods", [4, 8])
def test_intervals_of_several_methods_hold_together_in_95_percent(num_methods: int) -> None:
    random = np.random.default_rng(num_methods)
    first = _population(random)
    seconds = [_population(random).under[0] for _ in range(num_methods)]
    populations = [first._replace(under=(one, first.under[1])) for one in seconds]
    num_trials, num_held = 250, {CONFIDENCE: 0, joint_confidence(num_methods): 0}
    for _ in range(num_trials):
        # The methods answer the same questions, over the same baseline.
        drawn = random.integers(0, POPULATION, 40)
        samples = [
            RatioOfSums([part[drawn] for part in one.over], [part[drawn] for part in one.under])
            for one in populations
        ]
        for confidence in num_held:
            intervals = [paired_interval(sample, confidence) for sample in samples]
            num_held[confidence] += all(
                low <= one.value <= high
                for one, (low, high) in zip(populations, intervals, strict=True)
            )
    single, together = (count / num_trials for count in num_held.values())
    assert 0.93 <= together <= 0.98
    assert single < 0.9, "each of 95% alone, they hold together less often"


def _ratio(*seconds: float) -> RatioOfSums:
    """Questions of ten tokens, a second each in plain decoding."""
    tokens, plain = np.full(len(seconds), 10.0), np.ones(len(seconds))
    return _of_rates(tokens, np.array(seconds), tokens, plain)


def test_of_too_few_questions_there_is_no_interval() -> None:
    few = _ratio(*(0.5 + index / 10 for index in range(LEAST_QUESTIONS - 1)))
    assert few.value > 0 and paired_interval(few) is UNKNOWN
    enough = _ratio(*(0.5 + index / 10 for index in range(LEAST_QUESTIONS)))
    assert paired_interval(enough).is_known


def test_an_interval_is_around_its_figure_and_wider_with_more_confidence() -> None:
    ratio = _ratio(0.4, 0.5, 0.6, 0.55, 0.45, 0.7)
    usual, wide = paired_interval(ratio), paired_interval(ratio, confidence=0.99)
    assert wide.low < usual.low < ratio.value < usual.high < wide.high
    assert usual == paired_interval(ratio), "draws are the same at every call"


def test_a_figure_that_is_the_same_for_all_questions_has_no_width() -> None:
    interval = paired_interval(_ratio(*[0.5] * 6))
    assert interval == pytest.approx(Interval(2.0, 2.0)) and interval.excludes_one


def test_a_figure_without_tokens_or_seconds_has_no_interval() -> None:
    nothing, ones = np.zeros(6), np.ones(6)
    assert paired_interval(_of_rates(nothing, ones, ones, ones)) is UNKNOWN
    none = _of_rates(ones, nothing, ones, ones)
    assert math.isnan(none.value) and paired_interval(none) is UNKNOWN
