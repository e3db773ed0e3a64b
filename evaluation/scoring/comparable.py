"""Which answer files may be compared: groups of equal conditions, methods in them, runs of these.

The leaderboard shows what this module arranges. A group is everything measured on one model, device
and dtype with the same threads, token limit and temperature, over one benchmark's questions; its
entries are methods with their options; an entry's runs are the files that differ in nothing else.
A second run of a method made in the same interleaved run is no entry: it says what the group's run
cannot tell apart (``scoring/noise.py``).

Use:
    groups = group_answers([load_answers(path) for path in paths], base=None)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from evaluation.answers.answer_file import read_lines
from evaluation.answers.record import UNKNOWN, RunRecord, Use, keys
from evaluation.answers.row import AnswerRow
from evaluation.scoring.figures import (
    CODE,
    OVERALL,
    RunFigures,
    in_task_order,
    left_out_text,
    measure,
    run_figures,
)
from evaluation.scoring.intervals import UNKNOWN as UNKNOWN_INTERVAL
from evaluation.scoring.intervals import Interval
from evaluation.scoring.noise import (
    PrefillGap,
    Verdict,
    is_unsteady,
    prefill_gap,
    prefill_warnings,
    verdict,
)
from evaluation.scoring.per_question import question_frame, used_defects_text
from model.commands.command_line import UserError

DEFAULT_BASELINE = "vanilla"
MBPP = "mbpp"
SPEC_BENCH = "spec_bench"
# The sidecar's role of a second run of the baseline.
NOISE_FLOOR = "noise floor"


@dataclass(frozen=True, slots=True)
class AnswerFile:
    """One answer file with its sidecar's record, which is empty if there is none."""

    path: Path
    rows: list[AnswerRow]
    record: RunRecord

    @property
    def method(self) -> str:
        """The sidecar's method; without one, the model id, which Spec-Bench names methods in."""
        model_id = self.record.model_id or self.rows[0].model_id or self.path.stem
        return str(self.record.method or model_id)

    @property
    def options(self) -> dict[str, Any]:
        """The method's options and what else makes two files more than runs of the same."""
        return self.record.options | self.record.further_options()

    @property
    def bench(self) -> str:
        """The sidecar's benchmark; without one, MBPP if every question is code."""
        if self.record.bench_name:
            return str(self.record.bench_name)
        return MBPP if self.is_code else SPEC_BENCH

    @property
    def frame(self) -> pd.DataFrame:
        """The rows as figures see them."""
        return question_frame(self.rows, self.record.max_new_tokens)

    @property
    def is_code(self) -> bool:
        """Whether every question is code."""
        return all(row.category == CODE for row in self.rows)

    @property
    def is_noise_floor(self) -> bool:
        """Whether it is a second run of a method, made to see how far two runs of one differ."""
        return self.record.values.get("role") == NOISE_FLOOR

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions that a comparison needs equal, the questions left aside, as texts."""
        return (self.record.model, *self.record.compared())


def condition_names() -> list[str]:
    """Return the names of a group's conditions: the model, what the records say, the questions."""
    return ["model", *keys(Use.COMPARED), "question_file", "bench"]


@dataclass(slots=True)
class Entry:
    """A method with its options in a group: one row of the table.

    Attributes:
        method: The method's name.
        options: Its options, as the sidecars give them.
        runs: Its answer files for each benchmark, in path order.
        differing: Those of its options that tell it from others of its method.
    """

    method: str
    options: dict[str, Any]
    runs: dict[str, list[AnswerFile]] = field(default_factory=dict)
    differing: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The method's name, with the options that tell it from others of that name."""
        differing = ", ".join(f"{name}={value}" for name, value in self.differing.items())
        return self.method + (f" ({differing})" if differing else "")

    @property
    def files(self) -> list[AnswerFile]:
        """All answer files of this entry."""
        return [file for files in self.runs.values() for file in files]


class Measured(NamedTuple):
    """An entry's figures against its group's baseline.

    Attributes:
        entry: Whose figures.
        figures: They.
        notes: A line for each run not used whole.
        gaps: Runs in which equal prompts took another time than in the baseline's.
    """

    entry: Entry
    figures: RunFigures
    notes: list[str]
    gaps: list[PrefillGap]


class Group(NamedTuple):
    """Entries measured under equal conditions.

    Attributes:
        conditions: What is equal, in the order of `condition_names`.
        rows: The entries' figures, best overall speed-up first.
        baseline: What they are compared with.
        floor: A second run of the baseline's method over its first; None if none was made.
    """

    conditions: tuple[str, ...]
    rows: list[Measured]
    baseline: Entry
    floor: Measured | None = None

    @property
    def tasks(self) -> list[str]:
        """Every task that occurs, in Spec-Bench's order."""
        return in_task_order(task for row in self.rows for task in row.figures.mean.index)

    @property
    def facts(self) -> dict[str, str]:
        """Conditions by name, and the commits the answers were made with."""
        commits = {file.record.git_commit for file in self.files}
        known = sorted(_short_commit(str(commit)) for commit in commits if commit) or [UNKNOWN]
        named = dict(zip(condition_names(), self.conditions, strict=True))
        return named | {"commit": " ".join(known)}

    @property
    def files(self) -> list[AnswerFile]:
        """The answer files of all entries."""
        return [file for row in self.rows for file in row.entry.files]

    @property
    def warnings(self) -> list[str]:
        """Lines about runs that took another time than the baseline's for equal prompts."""
        rows = [*self.rows, *([self.floor] if self.floor else [])]
        return prefill_warnings([gap for row in rows for gap in row.gaps])

    def floor_interval(self, name: str) -> Interval:
        """Return how far two runs of one method differ in an overall speed-up; unknown if not run."""
        return self.floor.figures.interval(OVERALL, name) if self.floor else UNKNOWN_INTERVAL

    def verdict(self, row: Measured, name: str) -> Verdict:
        """Return what an overall speed-up says of a row, beyond what two runs of one method differ."""
        return verdict(row.figures.interval(OVERALL, name), self.floor_interval(name))

    @property
    def is_unsteady(self) -> bool:
        """Whether two runs of one method differ too much to compare methods by."""
        return is_unsteady(self.floor_interval("exact_speedup"))


def load_answers(path: Path) -> AnswerFile:
    """Read an answer file and its sidecar.

    Raises:
        UserError: Either is not what it should be.
    """
    return AnswerFile(path, [row for _, row in read_lines(path)], RunRecord.read(path))


def differing_conditions(path: str | Path, base_path: str | Path) -> list[str]:
    """Say in which conditions two answer files' sidecars disagree; what either lacks is not compared.

    Raises:
        UserError: A sidecar is not readable.
    """
    differing = RunRecord.read(path).differing(RunRecord.read(base_path), Use.COMPARED | Use.WARNED)
    return [
        f"{key} is {mine!r} in {path} but {theirs!r} in {base_path}"
        for key, mine, theirs in differing
    ]


def group_answers(files: Sequence[AnswerFile], base: str | None = None) -> list[Group]:
    """Arrange answer files into groups and measure every entry against its group's baseline.

    Args:
        files: Answer files; their order is the order of runs.
        base: The baseline: a method's name, or the path of one of the files, which is then the
            baseline of its group while the others keep theirs. None takes vanilla.

    Returns:
        Groups by conditions, entries by overall speed-up, best first.

    Raises:
        UserError: A group has no baseline or several, or files cannot be compared.
    """
    spec_bench = {
        file.conditions: file.record.question_file for file in files if file.bench == SPEC_BENCH
    }
    arranged: dict[tuple[str, ...], dict[tuple[str, str, bool], Entry]] = {}
    for file in files:
        is_mbpp = file.bench == MBPP and file.is_code
        asked = (file.record.question_file, file.bench)
        if is_mbpp and file.conditions in spec_bench:
            asked = (spec_bench[file.conditions], SPEC_BENCH)
        group = arranged.setdefault((*file.conditions, *asked), {})
        key = (file.method, json.dumps(file.options, sort_keys=True), file.is_noise_floor)
        entry = group.setdefault(key, Entry(file.method, file.options))
        entry.runs.setdefault(file.bench, []).append(file)
    return [_measured_group(key, list(arranged[key].values()), base) for key in sorted(arranged)]


def _measured_group(conditions: tuple[str, ...], found: list[Entry], base: str | None) -> Group:
    floors = [entry for entry in found if entry.files[0].is_noise_floor]
    entries = [entry for entry in found if not entry.files[0].is_noise_floor]
    _tell_apart(entries)
    baseline = _find_baseline(conditions, entries, base)
    rows = [_measure(entry, baseline, conditions[-1]) for entry in entries]
    floor = _measure_floor(floors, entries, conditions[-1]) if floors else None

    def rank(row: Measured) -> tuple[float, str]:
        speedup = row.figures.figure(OVERALL, "speedup")
        return (math.inf if math.isnan(speedup) else -speedup, row.entry.label)

    return Group(conditions, sorted(rows, key=rank), baseline, floor)


def _measure_floor(floors: list[Entry], entries: list[Entry], bench: str) -> Measured:
    """Measure the second run of a method against its first."""
    second = floors[0].files[0]
    first = [
        entry
        for entry in entries
        if entry.method == second.method and entry.files[0].record.options == second.record.options
    ]
    if len(floors) > 1 or len(first) != 1:
        raise UserError(
            f"{second.path} is a second run of {second.method} (its sidecar's role is "
            f"{NOISE_FLOOR!r}), with {len(first)} first runs and {len(floors) - 1} other second "
            "runs of other options beside it; give one first run, or leave this file out"
        )
    return _measure(floors[0], first[0], bench)


def _tell_apart(entries: list[Entry]) -> None:
    """Find the options in which entries of one method differ."""
    for entry in entries:
        others = [other.options for other in entries if other.method == entry.method]
        entry.differing = {
            name: entry.options[name]
            for name in sorted(entry.options)
            if any(options.get(name) != entry.options[name] for options in others)
        }


def _find_baseline(conditions: tuple[str, ...], entries: list[Entry], base: str | None) -> Entry:
    where = "the group " + ", ".join(
        f"{name} {value}" for name, value in zip(condition_names(), conditions, strict=True)
    )
    base_path = Path(base).resolve() if base is not None and Path(base).is_file() else None
    if base_path is not None and RunRecord.read(base_path).values.get("role") == NOISE_FLOOR:
        raise UserError(f"--base {base}: it is a second run ({NOISE_FLOOR}); name the first run")
    for entry in entries:
        if base_path in [file.path.resolve() for file in entry.files]:
            return entry
    name = DEFAULT_BASELINE if base is None or base_path is not None else base
    found = [entry for entry in entries if _is_method(entry, name)]
    if not found:
        methods = ", ".join(
            f"{entry.label} ({entry.files[0].path})"
            for entry in sorted(entries, key=lambda entry: entry.label)
        )
        raise UserError(
            f"{where} has no baseline {name!r} among {methods}; add its answer file, or name "
            "another with --base"
        )
    if len(found) > 1:
        raise UserError(
            f"{where} has {len(found)} baselines: {', '.join(sorted(entry.label for entry in found))}; "
            "name one answer file with --base"
        )
    return found[0]


def _is_method(entry: Entry, name: str) -> bool:
    """Foreign files name their method within the model id: ``vicuna-7b-v1.3-vanilla-float16``."""
    is_foreign = entry.files[0].record.is_foreign
    return entry.method == name or (is_foreign and name in entry.method.split("-"))


def _measure(entry: Entry, baseline: Entry, group_bench: str) -> Measured:
    """An entry against its baseline; MBPP beside Spec-Bench gives its code figures alone."""
    parts: list[RunFigures] = []
    notes: list[str] = []
    gaps: list[PrefillGap] = []
    # The group's own benchmark last: where MBPP is beside it, code is MBPP's.
    for bench in sorted(entry.runs, key=lambda name: name == group_bench):
        pairs = list(_pairs(entry.runs[bench], baseline, bench))
        names = (str(pairs[0][0].path), str(pairs[0][1].path))
        figures = measure([(file.frame, base.frame) for file, base in pairs], names)
        parts.append(figures if bench == group_bench else figures.only(CODE))
        notes += [note for file, base in pairs for note in _notes(file, base)]
        gaps += filter(None, (_prefill_gap(file, base) for file, base in pairs))
    return Measured(entry, RunFigures.joined(parts), notes, gaps)


def _prefill_gap(file: AnswerFile, base: AnswerFile) -> PrefillGap | None:
    return prefill_gap(file.rows, base.rows, (file.path.name, base.path.name))


def _notes(file: AnswerFile, base_file: AnswerFile) -> Iterator[str]:
    """Yield lines about a run for readers of its figures."""
    names = (str(file.path), str(base_file.path))
    left_out = left_out_text(run_figures(file.frame, base_file.frame, names), names)
    if left_out:
        yield left_out
    yield from filter(None, (used_defects_text(file.frame, str(file.path)),))


def _pairs(
    files: Sequence[AnswerFile], baseline: Entry, bench: str
) -> Iterator[tuple[AnswerFile, AnswerFile]]:
    """Each run with the baseline's run of the same place."""
    base_files = baseline.runs.get(bench)
    if base_files is None:
        raise UserError(
            f"{files[0].path} holds answers to {bench}, which the baseline {baseline.label} lacks; "
            "add the baseline's answer file"
        )
    for index, file in enumerate(files):
        yield file, base_files[index % len(base_files)]


def _short_commit(commit: str) -> str:
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", commit)
