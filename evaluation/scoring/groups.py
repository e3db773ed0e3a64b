"""Groups of comparable answers: files with their records, methods in a group, their figures.

`comparable.py` makes them; tables, notes and pictures show them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from evaluation.answers.differences import Equality
from evaluation.answers.record import NOISE_FLOOR, UNKNOWN, RunRecord, Use, keys
from evaluation.answers.row import AnswerRow
from evaluation.scoring.figures import CODE, OVERALL, SPEC_BENCH_TASKS, RunFigures, in_task_order
from evaluation.scoring.intervals import UNKNOWN as UNKNOWN_INTERVAL
from evaluation.scoring.intervals import (
    Interval,
    PrefillGap,
    SpeedVerdict,
    prefill_warnings,
    speed_verdict,
)
from evaluation.scoring.per_question import Tokenizer, question_frame

MBPP = "mbpp"
PLAIN = "vanilla"
SPEC_BENCH = "spec_bench"


@dataclass(frozen=True)
class AnswerFile:
    """One answer file with its sidecar's record, which is empty if there is none."""

    path: Path
    rows: list[AnswerRow]
    record: RunRecord
    tokenizer: Tokenizer | None = (
        None  # counts a baseline's tokens from its texts, as Spec-Bench does
    )

    @property
    def method(self) -> str:
        """The sidecar's method; without one, the model id, which Spec-Bench names methods in."""
        model_id = self.record.model_id or self.rows[0].model_id or self.path.stem
        return " ".join(str(self.record.method or model_id).split())  # a line, whatever it is

    @property
    def options(self) -> dict[str, Any]:
        """The method's options and what else makes two files more than runs of the same."""
        return self.record.options | self.record.further_options()

    @property
    def bench(self) -> str:
        """The sidecar's benchmark; without one, that whose categories the questions have."""
        if self.record.bench_name:
            return str(self.record.bench_name)
        if self.is_code:
            return MBPP
        return SPEC_BENCH if self.frame["task"].isin(SPEC_BENCH_TASKS).any() else UNKNOWN

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The rows as figures see them; read alone."""
        return question_frame(self.rows, self.record.max_new_tokens)

    @cached_property
    def base_frame(self) -> pd.DataFrame:
        """The rows as figures see them where they are the baseline's."""
        return question_frame(self.rows, self.record.max_new_tokens, self.tokenizer)

    @property
    def is_code(self) -> bool:
        return all(row.category == CODE for row in self.rows)

    def is_of(self, method: str) -> bool:
        """Whether a method wrote it; foreign files name it in the model id: `vicuna-7b-v1.3-vanilla-float16`."""
        is_foreign = self.record.is_foreign
        return self.method == method or (is_foreign and method in self.method.split("-"))

    @property
    def is_noise_floor(self) -> bool:
        """Whether it is a second run of a method, made to see how far two runs of one differ."""
        return self.record.role == NOISE_FLOOR

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions that a comparison needs equal, the questions left aside, as texts."""
        return (self.record.model, *self.record.compared())


def condition_names() -> list[str]:
    """Return the names of a group's conditions: the model, what the records say, the questions."""
    return ["model", *keys(Use.COMPARED), "question_file", "bench"]


@dataclass(slots=True)
class Entry:
    """A method with its options in a group: one row of the table."""

    method: str
    options: dict[str, Any]  # its options, as the sidecars give them
    # Its answer files for each benchmark, in path order.
    runs: dict[str, list[AnswerFile]] = field(default_factory=dict)
    # Those of its options in which entries of its method differ.
    differing: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The method's name, with the options that tell it from others of that name."""
        differing = ", ".join(f"{name}={value}" for name, value in self.differing.items())
        return self.method + (f" ({differing})" if differing else "")

    @property
    def files(self) -> list[AnswerFile]:
        return [file for files in self.runs.values() for file in files]


class TooFast(NamedTuple):
    """A task in which a method is faster over its baseline than its acceptance allows."""

    task: str
    speedup: float
    mat: float  # mean accepted tokens

    def text(self, name: str, base_name: str) -> str:
        """Say so of a method and a baseline of these names."""
        where = "" if self.task == OVERALL else f" in {self.task}"
        return (
            f"Impossible: {name} is {self.speedup:.2f}x as fast as {base_name}{where} with {self.mat:.2f} mean "
            "accepted tokens; a step that verifies a draft takes at least as long as a plain one: the two were not "
            "measured under the same conditions"
        )


class Broken(NamedTuple):
    """An identity of honest runs that files break."""

    line: str
    # Whether a run that was interrupted, or in which questions failed, breaks it too.
    may_be_honest: bool = False

    @property
    def text(self) -> str:
        """The line, with what it means."""
        word = "Not of the same questions" if self.may_be_honest else "No honest run has this"
        return f"{word}: {self.line}"


class Measured(NamedTuple):
    """An entry's figures against its group's baseline, or another entry."""

    entry: Entry
    figures: RunFigures
    equality: Equality  # how many answers are the baseline's
    notes: Sequence[str] = ()  # a line for each run with defects or questions left out
    gaps: Sequence[PrefillGap] = ()  # runs in which equal prompts took another time
    broken: Sequence[Broken] = ()  # identities of honest runs that they break
    too_fast: Sequence[TooFast] = ()  # tasks that are faster than acceptance allows


class Group(NamedTuple):
    """Entries measured under equal conditions."""

    conditions: tuple[str, ...]  # their values, in the order of `condition_names`
    rows: list[Measured]  # the entries' figures, best overall speed-up first
    baseline: Entry
    # A second run of the baseline's method over its first; None if there is none.
    floor: Measured | None = None
    # How many methods are compared at once: all intervals are widened for them (`joint_confidence`).
    num_compared: int = 1

    @property
    def tasks(self) -> list[str]:
        """Every task that occurs, in Spec-Bench's order."""
        return in_task_order(task for row in self.rows for task in row.figures.mean.index)

    @property
    def facts(self) -> dict[str, str]:
        """Conditions by name, and the commits the answers were made with."""
        commits = {file.record.git_commit for file in self.files}
        # A full hash is shown by its first digits.
        short = partial(re.sub, r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1")
        known = sorted(short(str(commit)) for commit in commits if commit) or [UNKNOWN]
        named = dict(zip(condition_names(), self.conditions, strict=True))
        return named | {"commit": " ".join(known)}

    @property
    def files(self) -> list[AnswerFile]:
        return [file for row in self.rows for file in row.entry.files]

    @property
    def measured(self) -> list[Measured]:
        """The rows, and the second run of the baseline."""
        return [*self.rows, *([self.floor] if self.floor else [])]

    @property
    def warnings(self) -> list[str]:
        """Lines about runs that took another time than the baseline's for equal prompts."""
        return prefill_warnings([gap for row in self.measured for gap in row.gaps])

    def floor_interval(self, name: str) -> Interval:
        """Return how far two runs of one method differ in an overall speed-up; unknown if not run."""
        return self.floor.figures.interval(OVERALL, name) if self.floor else UNKNOWN_INTERVAL

    def verdict(self, row: Measured) -> SpeedVerdict:
        """Return the verdict on a row's exact speed-up, given the difference of two runs of one method."""
        return self._disproof(row) or self._beyond_noise(row)

    def pair_verdict(self, row: Measured, other: Entry) -> SpeedVerdict:
        """Return the same for figures over another entry than the baseline.

        What disproves a method beside the baseline disproves it here, too. A step of the other entry may be the
        slower one, so that acceptance allows any speed-up.
        """
        labels = (row.entry.label, other.label)
        for member in self.rows:
            if member.entry.label in labels and (disproof := self._disproof(member)):
                return disproof
        return SpeedVerdict.NOT_LOSSLESS if row.equality.is_broken else self._beyond_noise(row)

    def _beyond_noise(self, row: Measured) -> SpeedVerdict:
        interval = row.figures.interval(OVERALL, "exact_speedup")
        return speed_verdict(interval, self.floor_interval("exact_speedup"))

    def _disproof(self, row: Measured) -> SpeedVerdict | None:
        """Return why a row's speed-up over the baseline is none, if it is."""
        if row.equality.is_broken:
            return SpeedVerdict.NOT_LOSSLESS
        if row.too_fast:
            return SpeedVerdict.IMPOSSIBLE
        # The baseline's files and those of its second run are in every verdict.
        bases = [row for row in self.measured if row.entry is self.baseline or row is self.floor]
        if broken := [one for member in (row, *bases) for one in member.broken]:
            is_honest = all(one.may_be_honest for one in broken)
            return SpeedVerdict.PARTIAL if is_honest else SpeedVerdict.BROKEN
        # The baseline may be another program, too, whose build lacks instruction sets of the machine.
        files = [*row.entry.files, *self.baseline.files]
        return SpeedVerdict.UNEQUAL if any(it.record.engine.get("lacks") for it in files) else None
