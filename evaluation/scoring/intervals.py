"""How sure a figure is: its confidence interval over questions, and how steady the machine was.

A speed-up compares seconds measured at different times. Two signs show whether the machine was
equally fast: how long equal prompts took, and how far a second run of the baseline, made in the same
interleaved run, is from the first (the noise floor). Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from evaluation.answers.row import AnswerRow

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
# Below it an error is that of the sums.
ROUNDING = 1e-12
# Below it no interval keeps its word: of 5 questions one of 95% is already about as wide as most speed-ups.
LEAST_QUESTIONS = 5
TOO_FEW = f"fewer than {LEAST_QUESTIONS} questions: no interval and no verdict"
# Prefill seconds of the same prompts differ by less than this on a machine that is left alone.
LARGEST_PREFILL_RATIO = 1.15
# How far two runs of one method may be apart; beyond it most methods cannot be ranked.
LARGEST_FLOOR_RATIO = 1.10
# How much faster a step of a method may be than the baseline's by chance alone.
LARGEST_STEP_GAIN = 1.10
# The same where there are too few questions for an interval.
LARGEST_GAIN_OF_FEW = 1.5


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


def joint_confidence(num_intervals: int) -> float:
    """Return the confidence of each of so many intervals that all hold together in `CONFIDENCE` (Bonferroni).

    The largest of several differences by chance is larger than one.
    """
    return 1 - (1 - CONFIDENCE) / num_intervals


class RatioOfSums(NamedTuple):
    """A figure that is a product of sums over questions, divided by others, such as the ratio of two rates."""

    # What is summed above the line and below it, each [Q]: one entry a question, all questions in one order.
    over: Sequence[np.ndarray]
    under: Sequence[np.ndarray]

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


class SpeedVerdict(Enum):
    """How a method compares with its baseline."""

    FASTER = "faster"
    SLOWER = "slower"
    ALIKE = "not told apart"
    NOT_LOSSLESS = "not lossless"
    IMPOSSIBLE = "no verdict: faster than acceptance allows"
    BROKEN = "no verdict: the figures contradict each other"
    UNEQUAL = "no verdict: a build lacks instruction sets of the machine"
    PARTIAL = "no verdict: not of the same questions"
    UNSTEADY = "no verdict: the machine was too unsteady"
    TOO_FEW = "no verdict: too few questions"


def noise_factor(floor: Interval) -> float:
    """Return by how much two runs of one method may differ; 1 if it is not known.

    Which of the two runs is above the line is arbitrary, so a floor of [0.93, 1.00] says as much as one of
    [1.00, 1.08].
    """
    return max(1.0, floor.high, 1 / floor.low) if floor.is_known else 1.0


def speed_verdict(interval: Interval, floor: Interval = UNKNOWN) -> SpeedVerdict:
    """Return the verdict that the interval of a speed-up allows, which has to lie beyond 1 and the noise floor.

    `floor` is the interval of a second run of the baseline over the first.
    """
    if not interval.is_known:
        return SpeedVerdict.TOO_FEW
    if is_unsteady(floor):
        return SpeedVerdict.UNSTEADY
    factor = noise_factor(floor)
    if interval.low > factor:
        return SpeedVerdict.FASTER
    if interval.high < 1 / factor:
        return SpeedVerdict.SLOWER
    return SpeedVerdict.ALIKE


def is_unsteady(floor: Interval) -> bool:
    """Whether two runs of one method differ too much to compare methods by; False if unknown."""
    return noise_factor(floor) > LARGEST_FLOOR_RATIO


def largest_speedup(mat_ratio: float, floor: Interval = UNKNOWN, is_sure: bool = True) -> float:
    """Return the speed-up that a method may have with so many times the baseline's mean accepted tokens.

    A step that verifies a draft does all that a plain step does: at best it takes as long, and the speed-up is the
    ratio of the mean accepted tokens. Of a few questions, which have no interval, chance allows more. NaN if the
    ratio is not known.
    """
    gain = LARGEST_STEP_GAIN if is_sure else LARGEST_GAIN_OF_FEW
    return mat_ratio * gain * noise_factor(floor)


class PrefillGap(NamedTuple):
    """Equal prompts that took much longer in one of two files: the method's (`name`) or the baseline's."""

    name: str
    base_name: str
    num_prompts: int
    seconds: float
    base_seconds: float


def prefill_gap(
    rows: Sequence[AnswerRow], base_rows: Sequence[AnswerRow], names: tuple[str, str]
) -> PrefillGap | None:
    """Compare the prefill seconds of equal prompts in files of these names; None if they differ little."""
    num_prompts, seconds, base_seconds = equal_prompts(rows, base_rows)
    if not num_prompts or min(seconds, base_seconds) <= 0:
        return None
    if 1 / LARGEST_PREFILL_RATIO <= seconds / base_seconds <= LARGEST_PREFILL_RATIO:
        return None
    return PrefillGap(*names, num_prompts, seconds, base_seconds)


def prefill_warnings(gaps: Sequence[PrefillGap]) -> list[str]:
    """Return a line for each baseline file whose prompts took another time in other files."""
    found: dict[tuple[str, int, float], list[str]] = {}
    for gap in gaps:
        ratio = gap.seconds / gap.base_seconds
        text = f"{gap.seconds:.3g} s in {gap.name} ({ratio:.2f}x)"
        found.setdefault((gap.base_name, gap.num_prompts, gap.base_seconds), []).append(text)
    return [
        f"Reading the same {num_prompts} prompts took {base_seconds:.3g} s in {base_name}, but "
        f"{', '.join(dict.fromkeys(texts))}: the machine was not equally fast, or a method itself "
        "works on the prompt; distrust ratios between these files"
        for (base_name, num_prompts, base_seconds), texts in found.items()
    ]


def equal_prompts(
    rows: Sequence[AnswerRow], base_rows: Sequence[AnswerRow]
) -> tuple[int, float, float]:
    """Return how many prompts two files share, and the seconds that each file took to read them.

    Question, choice, turn and length make it the same prompt.
    """
    mine, theirs = (
        {
            (repr(row.question_id), index, turn, length): seconds
            for row in side
            for index, choice in enumerate(row.choices)
            for turn, (length, seconds) in enumerate(
                zip(choice.prompt_tokens, choice.prefill_time, strict=False)
            )
        }
        for side in (rows, base_rows)
    )
    common = mine.keys() & theirs.keys()
    return len(common), sum(mine[one] for one in common), sum(theirs[one] for one in common)
