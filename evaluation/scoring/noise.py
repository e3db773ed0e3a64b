"""How steady the machine was: the same prompts in two files, and two runs of one method.

A speed-up compares seconds measured at different times. Two signs show whether the machine was
equally fast: how long equal prompts took, and how far a second run of the baseline, made in the same
interleaved run, is from the first (the noise floor). Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from evaluation.answers.row import AnswerRow
from evaluation.scoring.intervals import UNKNOWN, Interval

# Prefill seconds of the same prompts differ by less than this on a machine that is left alone.
LARGEST_PREFILL_RATIO = 1.15
# How far two runs of one method may be apart; beyond it most methods cannot be ranked.
LARGEST_FLOOR_RATIO = 1.10
# How much faster a step of a method may be than the baseline's by chance alone.
LARGEST_STEP_GAIN = 1.10


class SpeedVerdict(Enum):
    """How a method compares with its baseline."""

    FASTER = "faster"
    SLOWER = "slower"
    ALIKE = "not told apart"
    NOT_LOSSLESS = "not lossless"
    IMPOSSIBLE = "no verdict: faster than acceptance allows"
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


def is_impossible(speedup: float, mat: float, base_mat: float, floor: Interval = UNKNOWN) -> bool:
    """Whether a speed-up is larger than acceptance allows.

    A step that verifies a draft does all that a plain step does: at best it takes as long, and the speed-up is the
    ratio of the mean accepted tokens. False if a figure is not known.
    """
    return speedup > mat / base_mat * LARGEST_STEP_GAIN * noise_factor(floor)


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
    mine, theirs = dict(_prefills(rows)), dict(_prefills(base_rows))
    common = mine.keys() & theirs.keys()
    seconds = sum(mine[prompt] for prompt in common)
    base_seconds = sum(theirs[prompt] for prompt in common)
    if not common or min(seconds, base_seconds) <= 0:
        return None
    if 1 / LARGEST_PREFILL_RATIO <= seconds / base_seconds <= LARGEST_PREFILL_RATIO:
        return None
    return PrefillGap(*names, len(common), seconds, base_seconds)


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


def _prefills(rows: Sequence[AnswerRow]) -> Iterator[tuple[tuple[str, int, int, int], float]]:
    """Yield the seconds of each prompt: question, choice, turn and length make it the same prompt."""
    for row in rows:
        for index, choice in enumerate(row.choices):
            turns = zip(choice.prompt_tokens, choice.prefill_time, strict=False)
            for turn, (length, seconds) in enumerate(turns):
                yield (repr(row.question_id), index, turn, length), seconds
