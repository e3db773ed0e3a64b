"""How steady the machine was: the same prompts in two files, and two runs of one method.

A speed-up compares seconds measured at different times. Two signs show whether the machine was
equally fast: how long equal prompts took, and how far a second run of the baseline, made in the same
interleaved run, is from the first (the noise floor). Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from evaluation.answers.row import AnswerRow
from evaluation.scoring.intervals import Interval

# Prefill seconds of the same prompts differ by less than this on a machine that is left alone.
LARGEST_PREFILL_RATIO = 1.15
# Upper over lower end of the noise floor; above it most methods cannot be ranked.
LARGEST_FLOOR_RATIO = 1.10


class SpeedVerdict(Enum):
    """How a method compares with its baseline."""

    FASTER = "faster"
    SLOWER = "slower"
    ALIKE = "not told apart"


def speed_verdict(interval: Interval, floor: Interval | None = None) -> SpeedVerdict:
    """Return the verdict that the interval of a speed-up allows.

    `floor` is that of a second run of the baseline over the first; None, or unknown, compares with 1.
    """
    low, high = (1.0, 1.0) if floor is None or math.isnan(floor.low) else floor
    if interval.low > max(1.0, high):
        return SpeedVerdict.FASTER
    if interval.high < min(1.0, low):
        return SpeedVerdict.SLOWER
    return SpeedVerdict.ALIKE


def is_unsteady(floor: Interval) -> bool:
    """Whether two runs of one method differ too much to compare methods by; False if unknown."""
    return floor.high > LARGEST_FLOOR_RATIO * floor.low


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
