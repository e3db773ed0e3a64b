"""The sentences around the leaderboard's tables: conditions, options, noise, published figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from evaluation.reporting.memory_age import order_notes
from evaluation.reporting.tables import bounds_text, figure_text
from evaluation.reporting.titles import (
    engine_text,
    group_facts,
    method_title,
    options_text,
    shared_options,
    short_titles,
)
from evaluation.scoring.figures import OVERALL
from evaluation.scoring.groups import Group
from evaluation.scoring.intervals import (
    LARGEST_FLOOR_RATIO,
    TOO_FEW,
    SpeedVerdict,
    is_unsteady,
    noise_factor,
)

# Keys of a sidecar that are no conditions, and may explain a ratio all the same.
CIRCUMSTANCES = {
    "git_commit": "commits",
    "versions": "versions",
    "kernel_names": "kernels",
    "warmup": "numbers of warm-up questions",
}
INTERVALS = "paired intervals over questions (symmetric bootstrap-t)"
FLOOR_NAMES = {
    "exact_speedup": "by the exact speed-up",
    "speedup": "as Spec-Bench counts",
    "decode_speedup": "by decoding alone",
}


def group_caption(facts: Mapping[str, str]) -> str:
    return "; ".join(facts.values())


def alarms(groups: Sequence[Group]) -> list[str]:
    """Return a line for each reason not to believe a group's figures: answers, impossible figures, the machine."""
    lines = []
    for group, facts in zip(groups, group_facts(groups), strict=True):
        where = f" ({group_caption(facts)})" if len(groups) > 1 else ""
        lines += [f"{line}{where}" for line in _group_alarms(group)]
    return lines


def _group_alarms(group: Group) -> Iterator[str]:
    titles = short_titles(group)
    base = titles[group.baseline.label]
    for row in group.rows:
        title = titles[row.entry.label]
        if row.equality.is_broken:
            yield (
                f"Not lossless: {title} has other answers than {base} to {row.equality} questions; its speed-up is "
                "that of another text (python -m evaluation.equal shows where they differ)"
            )
        if not row.equality.is_broken:
            yield from (fast.text(title, base) for fast in row.too_fast)
    for row in group.rows:
        if lacks := row.entry.files[0].record.engine.get("lacks"):
            yield (
                f"Not a fair comparison: {titles[row.entry.label]} was built without {lacks}, which this machine "
                "has; docs/numbers.md has the command that builds it for a machine"
            )
    yield from dict.fromkeys(one.text for row in group.measured for one in row.broken)
    floor = group.floor_interval("exact_speedup")
    if is_unsteady(floor):
        yield (
            "The machine was too unsteady for this comparison: two runs of the same method may differ by "
            f"{noise_factor(floor):.2f}x ({bounds_text(floor)}), more than {LARGEST_FLOOR_RATIO:.2f}x; "
            "close other programs, repeat with --runs 3 (eval.sh: RUNS=3), or ask more questions"
        )


def group_notes(group: Group, baseline: pd.Series | None) -> list[str]:
    """Return the notes that a group's tables need, a line each."""
    notes = [
        *_floor_notes(group),
        *_verdict_notes(group),
        *_rounding_notes(group),
        *_circumstance_notes(group),
        *order_notes(group),
        *group.warnings,
    ]
    if not all(math.isnan(row.figures.interval(OVERALL, "speedup").low) for row in group.rows):
        notes.insert(0, f"In brackets: {intervals_text(group)}")
    titles = short_titles(group)
    notes += [f"{titles[row.entry.label]}: {note}" for row in group.rows for note in row.notes]
    shared = shared_options(group)
    for row in group.rows:
        own = {name: value for name, value in row.entry.options.items() if name not in shared}
        options = options_text(own, row.entry.method)
        if engine := engine_text(row.entry):
            notes.append(f"{titles[row.entry.label]}: {engine}")
        if options:
            notes.append(f"{titles[row.entry.label]}: {options}")
    runs = {titles[row.entry.label]: row.figures.num_runs for row in group.rows}
    if max(runs.values()) > 1:
        counts = ", ".join(f"{count} of {title}" for title, count in runs.items())
        if len(set(runs.values())) == 1:
            counts = f"{max(runs.values())} of each method"
        notes.append(f"± is the standard deviation over runs: {counts}")
    if baseline is not None:
        notes.append(_published_speed_note(group, titles, baseline))
    return notes


def intervals_text(group: Group) -> str:
    """Say what a group's intervals are, the noise floor's included."""
    if group.num_compared == 1:
        return f"{INTERVALS}, each of 95%"
    return (
        f"{INTERVALS}, widened so that those of all {group.num_compared} methods hold together in 95% of "
        "comparisons (Bonferroni)"
    )


def difference_text(published: pd.DataFrame, groups: Sequence[Group]) -> str:
    """Return one sentence on why published figures differ from ours, with both sides' conditions.

    `published` are rows of one source and device.
    """
    row = published.iloc[0]
    models = ", ".join(dict.fromkeys(published["model"]))
    ours = " and ".join(f"({group_caption(facts)})" for facts in group_facts(groups))
    return (
        f"Why these differ from ours: they are of {models} on {row['device']} "
        f"({row['conditions']}), ours of {ours}; what a pass over several tokens costs, and how many "
        "of them are right, depends on device, model, precision and software, not on the method alone"
    )


def _floor_notes(group: Group) -> Iterator[str]:
    if group.floor is None:
        return
    name = method_title(group.floor.entry.method)
    found = {key: group.floor_interval(key) for key in FLOOR_NAMES}
    exact = found["exact_speedup"]
    if not exact.is_known:
        yield f"Two runs of {name} were made: {TOO_FEW}, and no noise floor"
        return
    details = ", ".join(f"{FLOOR_NAMES[key]} {bounds_text(it)}" for key, it in found.items())
    yield (
        f"Two runs of {name} differ by {bounds_text(exact)}: ratios of up to "
        f"{noise_factor(exact):.2f}x, either way, are not told apart ({details})"
    )


def _verdict_notes(group: Group) -> Iterator[str]:
    titles = short_titles(group)
    base = titles[group.baseline.label]
    beyond = " and the two runs' difference" if group.floor else ""
    wordings = {
        SpeedVerdict.FASTER: f"Faster than {base} (the interval of the exact speed-up lies beyond 1{beyond})",
        SpeedVerdict.SLOWER: f"Slower than {base}",
        SpeedVerdict.ALIKE: f"Not told apart from {base}",
        SpeedVerdict.NOT_LOSSLESS: f"Not lossless: other answers than {base}'s",
        SpeedVerdict.IMPOSSIBLE: "No verdict, since the speed-up is larger than acceptance allows",
        SpeedVerdict.BROKEN: "No verdict, since the figures contradict each other",
        SpeedVerdict.UNEQUAL: "No verdict, since it was built without instruction sets of the machine",
        SpeedVerdict.PARTIAL: "No verdict, since the figures are not of the same questions",
        SpeedVerdict.UNSTEADY: "No verdict, since the machine was too unsteady",
        SpeedVerdict.TOO_FEW: f"No verdict ({TOO_FEW})",
    }
    for verdict, wording in wordings.items():
        names = [
            titles[row.entry.label]
            for row in group.rows
            if row.entry is not group.baseline and group.verdict(row) is verdict
        ]
        if names:
            yield f"{wording}: {', '.join(names)}"


def _rounding_notes(group: Group) -> Iterator[str]:
    """Yield a line for each entry whose answers another program gave, and not all the same."""
    titles = short_titles(group)
    for row in group.rows:
        served = row.entry.files[0].record.is_served
        if served and row.equality.num_differing and not row.equality.is_broken:
            yield (
                f"{titles[row.entry.label]} has other answers to {row.equality} questions: another "
                "program may round otherwise; python -m evaluation.equal with --model-path and "
                "--served-dtype judges each"
            )


def _circumstance_notes(group: Group) -> Iterator[str]:
    """Yield a line for each circumstance that the group's files do not share: it may be the reason of a ratio."""
    titles = short_titles(group)
    base_files = group.baseline.files
    apart = [
        titles[row.entry.label]
        for row in group.rows
        if row.entry is not group.baseline
        and not all(
            any(file.record.ran_in_turn_with(base.record) for base in base_files)
            for file in row.entry.files
        )
    ]
    if apart:
        base = titles[group.baseline.label]
        yield (
            f"Not measured in turn with {base}, so that a slower minute of the machine is in the ratio: "
            f"{', '.join(apart)}"
        )
    for key, what in CIRCUMSTANCES.items():
        found: dict[str, list[str]] = {}
        for row in group.rows:
            for file in row.entry.files:
                if (value := file.record.values.get(key)) is not None:
                    found.setdefault(_value_text(value), []).append(titles[row.entry.label])
        if len(found) > 1:
            each = "; ".join(
                f"{value}: {', '.join(dict.fromkeys(of))}" for value, of in sorted(found.items())
            )
            yield f"Measured with different {what} ({each})"


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _published_speed_note(group: Group, titles: Mapping[str, str], baseline: pd.Series) -> str:
    speeds = {
        titles[row.entry.label]: row.figures.figure(OVERALL, "tokens_per_second")
        for row in group.rows
    }
    published = baseline["tokens_per_second"]
    ratios = ", ".join(
        f"{title} {figure_text(speed)} ({figure_text(speed / published, unit='x')})"
        for title, speed in speeds.items()
    )
    return (
        f"Tokens/s as Spec-Bench counts, and over the {published:.2f} of plain "
        f"decoding of {baseline['model']} on {baseline['device']} as published ({baseline['source']}); that "
        f"is another machine, so not a speed-up of the method: {ratios}"
    )
