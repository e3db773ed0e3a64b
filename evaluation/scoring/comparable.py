"""Which answer files may be compared: groups of equal conditions, methods in them, runs of these.

An entry of a group is a method with its options; its runs are the files that differ in nothing else. A second run
of a method made in the same interleaved run is no entry: it measures the group's noise floor. A server does not say
how it decodes: it is in the group of what it was measured in turn with.

Use:
    groups = group_answers([load_answers(path) for path in paths], base=None)
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from evaluation.answers.answer_file import Categories, read_lines
from evaluation.answers.differences import Equality, equality_of, read_ties
from evaluation.answers.record import BASELINE, NOISE_FLOOR, RunRecord, Use
from evaluation.scoring.figures import CODE, OVERALL, RunFigures, left_out_text, measure_runs
from evaluation.scoring.groups import (
    MBPP,
    PLAIN,
    SPEC_BENCH,
    AnswerFile,
    Broken,
    Entry,
    Group,
    Measured,
    TooFast,
    condition_names,
)
from evaluation.scoring.intervals import PrefillGap, joint_confidence, prefill_gap
from evaluation.scoring.ledger import broken_identities, too_fast
from evaluation.scoring.per_question import Tokenizer, uncategorised_text, used_defects_text
from model.commands.command_line import UserError

# A method's answers of a run, and the baseline's.
Pair = tuple[AnswerFile, AnswerFile]


def load_answers(
    path: Path, categories: Categories | None = None, tokenizer: Tokenizer | None = None
) -> AnswerFile:
    """Read an answer file and its sidecar; `categories` are given to rows without one, or renamed."""
    categories = categories or Categories()
    rows = [categories.of(row) for _, row in read_lines(path)]
    return AnswerFile(path, rows, RunRecord.read(path), tokenizer)


def load_all(
    paths: Sequence[Path],
    named: Sequence[str],
    left_out: list[str],
    categories: Categories | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[AnswerFile]:
    """Read answer files; what is in a folder need not be one, and `left_out` gets a line for each that is not.

    `named` is what was asked for, files and folders; `categories` and `tokenizer` are as in `load_answers`. A
    `UserError` if a file that was named cannot be read, or none can.
    """
    must_be_read = {Path(name).resolve() for name in named}
    files = []
    reasons = []
    for path in paths:
        try:
            files.append(load_answers(path, categories, tokenizer))
        except UserError as error:
            if path.resolve() in must_be_read:
                raise
            reasons.append(str(error))
    if paths and not files:
        raise UserError(reasons[0])
    left_out += reasons
    return files


def differing_conditions(path: str | Path, base_path: str | Path) -> list[str]:
    """Return the conditions in which two answer files' sidecars differ; what is unknown is not compared."""
    differing = RunRecord.read(path).differing(RunRecord.read(base_path), Use.COMPARED | Use.WARNED)
    return [
        f"{key} is {mine!r} in {path} but {theirs!r} in {base_path}"
        for key, mine, theirs in differing
    ]


def group_answers(
    files: Sequence[AnswerFile], base: str | None = None, left_out: list[str] | None = None
) -> list[Group]:
    """Arrange answer files into groups and measure every entry against its group's baseline.

    Groups are sorted by conditions, entries by overall speed-up, best first.

    Args:
        files: answer files; their order is the order of runs.
        base: the baseline: a method's name, or the path of one of the files, which is then the
            baseline of its group while the others keep theirs. None takes vanilla.
        left_out: gets a line for each group, and for each method in a group, that cannot be measured, as long
            as a group is left. None: that is an error.

    Raises:
        UserError: if a group has no baseline or several, or files cannot be compared.
    """
    found = _conditions(files)
    spec_bench = {
        found[file.path]: file.record.question_file for file in files if file.bench == SPEC_BENCH
    }
    arranged: dict[tuple[str, ...], dict[tuple[str, str, bool], Entry]] = {}
    for file in files:
        is_mbpp = file.bench == MBPP and file.is_code
        asked = (file.record.question_file, file.bench)
        if is_mbpp and found[file.path] in spec_bench:
            asked = (spec_bench[found[file.path]], SPEC_BENCH)
        group = arranged.setdefault((*found[file.path], *asked), {})
        key = (file.method, json.dumps(file.options, sort_keys=True), file.is_noise_floor)
        entry = group.setdefault(key, Entry(file.method, file.options))
        entry.runs.setdefault(file.bench, []).append(file)
    groups = []
    reasons: list[str] = []
    for conditions, entries in sorted(arranged.items(), key=lambda item: item[0]):
        try:
            groups.append(_measured_group(conditions, list(entries.values()), base, reasons))
        except UserError as error:
            reasons.append(str(error))
    if reasons and (left_out is None or not groups):
        raise UserError(reasons[0])
    if left_out is not None:
        left_out += reasons
    return groups


def _conditions(files: Sequence[AnswerFile]) -> dict[Path, tuple[str, ...]]:
    """Return the conditions of each file; a server's are a method's of its run, else the run's first file's."""
    of_run: dict[str, tuple[str, ...]] = {}
    for file in sorted(files, key=lambda one: (one.record.is_served, one.record.role != BASELINE)):
        if run := file.record.interleaved_run:
            of_run.setdefault(run, file.conditions)
    return {
        file.path: of_run.get(file.record.interleaved_run or "", file.conditions)
        if file.record.is_served
        else file.conditions
        for file in files
    }


def _measured_group(
    conditions: tuple[str, ...], found: list[Entry], base: str | None, reasons: list[str]
) -> Group:
    """Measure a group; `reasons` gets a line for each method that cannot be measured."""
    floors = [entry for entry in found if entry.files[0].is_noise_floor]
    entries = [entry for entry in found if not entry.files[0].is_noise_floor]
    for entry in entries:  # the options in which entries of one method differ
        others = [other.options for other in entries if other.method == entry.method]
        entry.differing = {
            name: entry.options[name]
            for name in sorted(entry.options)
            if any(options.get(name) != entry.options[name] for options in others)
        }
    baseline = _find_baseline(conditions, entries, base)
    num_compared = max(1, len(entries) - 1)
    confidence = joint_confidence(num_compared)
    floor = _measure_floor(floors, entries, conditions[-1], confidence) if floors else None
    noise = floor.figures if floor else None
    rows = []
    for entry in entries:
        try:
            rows.append(_measure(entry, baseline, conditions[-1], confidence, noise))
        except UserError as error:
            if entry is baseline:
                raise
            reasons.append(str(error))
    rows.sort(key=partial(_rank, "speedup"))
    return Group(conditions, rows, baseline, floor, num_compared)


def _measure_floor(
    floors: list[Entry], entries: list[Entry], bench: str, confidence: float
) -> Measured:
    second = floors[0].files[0]
    first = [
        entry
        for entry in entries
        if entry.method == second.method and entry.files[0].record.options == second.record.options
    ]
    if len(floors) > 1 or len(first) != 1:
        raise UserError(
            f"{second.path} is a second run of {second.method} (its sidecar's role is "
            f"{NOISE_FLOOR!r}), with {len(first)} first runs of the same options and {len(floors) - 1} more "
            "second runs; allowed: one first run and no more second runs; give those, or leave this file out"
        )
    return _measure(floors[0], first[0], bench, confidence)


def _find_baseline(conditions: tuple[str, ...], entries: list[Entry], base: str | None) -> Entry:
    where = "the group " + ", ".join(
        f"{name} {value}" for name, value in zip(condition_names(), conditions, strict=True)
    )
    base_path = Path(base).resolve() if base is not None and Path(base).is_file() else None
    if base_path is not None and RunRecord.read(base_path).role == NOISE_FLOOR:
        raise UserError(f"--base {base}: it is a second run ({NOISE_FLOOR}); name the first run")
    for entry in entries:
        if base_path in [file.path.resolve() for file in entry.files]:
            return entry
    name = PLAIN if base is None or base_path is not None else base
    found = [entry for entry in entries if entry.files[0].is_of(name)]
    if base is None and not found:  # the first of several servers
        found = [entry for entry in entries if entry.files[0].record.role == BASELINE]
    if not found:
        methods = ", ".join(
            f"{entry.label} ({', '.join(str(file.path) for file in entry.files)})"
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


def _measure(
    entry: Entry,
    baseline: Entry,
    group_bench: str,
    confidence: float,
    noise: RunFigures | None = None,
) -> Measured:
    """Measure an entry against its baseline, and hold both against the identities of honest runs.

    `noise` are the figures of a second run of the baseline over the first.
    """
    broken: list[Broken] = []
    fast: list[TooFast] = []
    parts: list[RunFigures] = []
    notes: list[str] = []
    gaps: list[PrefillGap] = []
    answers: list[Pair] = []
    for pairs, figures, part in _measured_benches(entry, baseline, group_bench, confidence):
        parts.append(part)
        broken += broken_identities(pairs, figures)
        fast += too_fast(pairs, figures, noise)
        for (file, base), run in zip(pairs, figures.of_runs, strict=True):
            name, frame = str(file.path), file.frame
            found = [left_out_text(run, (name, str(base.path)))]
            found += [used_defects_text(frame, name), uncategorised_text(frame, name)]
            notes += filter(None, found)
        # Not within one interleaved run: a slow minute hits all its files.
        apart = [pair for pair in pairs if not pair[0].record.ran_in_turn_with(pair[1].record)]
        for file, base in apart:
            if gap := prefill_gap(file.rows, base.rows, (file.path.name, base.path.name)):
                gaps.append(gap)
        answers += pairs if entry is not baseline else []
    joined, equality = RunFigures.joined(parts), equality_of_files(answers)
    return Measured(entry, joined, equality, notes, gaps, broken, fast)


def _measured_benches(
    entry: Entry, baseline: Entry, group_bench: str, confidence: float
) -> Iterator[tuple[list[Pair], RunFigures, RunFigures]]:
    """Yield the runs of each benchmark beside the baseline's, their figures, and those of them that a group has.

    MBPP beside Spec-Bench gives its code figures alone.
    """
    # The group's own benchmark last: where MBPP is beside it, code is MBPP's.
    for bench in sorted(entry.runs, key=lambda name: name == group_bench):
        pairs = list(_pairs(entry.runs[bench], baseline, bench))
        names = (str(pairs[0][0].path), str(pairs[0][1].path))
        frames = [
            (file.frame, base.frame if file is base else base.base_frame) for file, base in pairs
        ]
        figures = measure_runs(frames, names, confidence)
        yield pairs, figures, figures if bench == group_bench else figures.only(CODE)


def neighbours(group: Group) -> Iterator[tuple[Measured, Entry]]:
    """Measure each method of a group against the next slower one by the exact speed-up; yield them, fastest first.

    The baseline is left out: the group has every method's figures against it, and the identities that files break.
    """
    rows = [row for row in group.rows if row.entry is not group.baseline]
    confidence = joint_confidence(group.num_compared)
    for row, slower in itertools.pairwise(sorted(rows, key=partial(_rank, "exact_speedup"))):
        entry, other = row.entry, slower.entry
        shared = {bench: files for bench, files in entry.runs.items() if bench in other.runs}
        mine = Entry(entry.method, entry.options, shared, entry.differing)
        measured = list(_measured_benches(mine, other, group.conditions[-1], confidence))
        figures = RunFigures.joined([part for _, _, part in measured])
        equality = equality_of_files(pair for pairs, _, _ in measured for pair in pairs)
        yield Measured(mine, figures, equality), other


def _rank(name: str, row: Measured) -> tuple[float, str]:
    """Return the sort key of a row by an overall figure, the largest first."""
    value = row.figures.figure(OVERALL, name)
    return (math.inf if math.isnan(value) else -value, row.entry.label)


def equality_of_files(pairs: Iterable[Pair]) -> Equality:
    """Compare the answers of files with those of their baselines, all together."""
    equality = Equality()
    for file, base in pairs:
        num_ties = read_ties(file.path, base.path)
        found = equality_of(file.rows, file.record, base.rows, base.record, num_ties)
        equality = equality.plus(found)
    return equality


def paired_files(entry: Entry, baseline: Entry) -> Iterator[Pair]:
    """Yield each run's file of an entry with the baseline's of the same index."""
    for bench, files in entry.runs.items():
        yield from _pairs(files, baseline, bench)


def _pairs(files: Sequence[AnswerFile], baseline: Entry, bench: str) -> Iterator[Pair]:
    """Yield each run with the baseline's run of the same index."""
    base_files = baseline.runs.get(bench)
    if base_files is None:
        raise UserError(
            f"{files[0].path} holds answers to {bench}, which the baseline {baseline.label} lacks; "
            "add the baseline's answer file"
        )
    for index, file in enumerate(files):
        yield file, base_files[index % len(base_files)]
