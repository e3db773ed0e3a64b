"""The sentences around the leaderboard's tables: conditions, options, noise, published figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from evaluation.reporting.published import PublishedBaseline
from evaluation.reporting.tables import bounds_text, figure_text
from evaluation.reporting.titles import (
    entry_options,
    entry_titles,
    group_facts,
    method_title,
    shared_options,
)
from evaluation.scoring.figures import OVERALL
from evaluation.scoring.groups import Group
from evaluation.scoring.noise import LARGEST_FLOOR_RATIO, SpeedVerdict

WHAT_TO_DO = "close other programs, repeat with RUNS=3, or ask more questions"
INTERVALS = "In brackets: paired 95% intervals over questions (bootstrap)"
FLOOR_NAMES = {
    "exact_speedup": "by the exact speed-up",
    "speedup": "as Spec-Bench counts",
    "decode_speedup": "by decoding alone",
}


def group_caption(facts: Mapping[str, str]) -> str:
    return "; ".join(facts.values())


def alarms(groups: Sequence[Group]) -> list[str]:
    """Return a line for each group whose machine was too unsteady to compare methods."""
    lines = []
    for group, facts in zip(groups, group_facts(groups), strict=True):
        if group.is_unsteady:
            where = f" ({group_caption(facts)})" if len(groups) > 1 else ""
            lines.append(
                f"The machine was too unsteady for this comparison{where}: two runs of the same "
                f"method differ by {bounds_text(group.floor_interval('exact_speedup'))}, more than "
                f"{LARGEST_FLOOR_RATIO:.2f}x apart; {WHAT_TO_DO}"
            )
    return lines


def group_notes(group: Group, baseline: PublishedBaseline | None) -> list[str]:
    """Return the notes that a group's tables need, a line each."""
    notes = [*_floor_notes(group), *_verdict_notes(group), *group.warnings]
    if not all(math.isnan(row.figures.interval(OVERALL, "speedup").low) for row in group.rows):
        notes.insert(0, INTERVALS)
    titles = {label: title.short for label, title in entry_titles(group).items()}
    notes += [f"{titles[row.entry.label]}: {note}" for row in group.rows for note in row.notes]
    shared = shared_options(group)
    for row in group.rows:
        options = entry_options(row.entry, shared)
        if options:
            notes.append(f"{titles[row.entry.label]}: {options}")
    notes += _run_notes(group, titles)
    if baseline:
        notes.append(_published_speed_note(group, titles, baseline))
    return notes


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
    if math.isnan(exact.low):
        yield f"Two runs of {name} were made, but of fewer than two questions: no noise floor"
        return
    details = ", ".join(f"{FLOOR_NAMES[key]} {bounds_text(it)}" for key, it in found.items())
    yield (
        f"Two runs of {name} differ by {bounds_text(exact)}: ratios within this are not told apart "
        f"({details})"
    )


def _verdict_notes(group: Group) -> Iterator[str]:
    titles = entry_titles(group)
    base = titles[group.baseline.label].short
    beyond = " and the two runs' difference" if group.floor else ""
    wordings = {
        SpeedVerdict.FASTER: f"Faster than {base} (the interval of the exact speed-up lies beyond 1{beyond})",
        SpeedVerdict.SLOWER: f"Slower than {base}",
        SpeedVerdict.ALIKE: f"Not told apart from {base}",
    }
    for verdict, wording in wordings.items():
        names = [
            titles[row.entry.label].short
            for row in group.rows
            if row.entry is not group.baseline and group.verdict(row, "exact_speedup") is verdict
        ]
        if names:
            yield f"{wording}: {', '.join(names)}"


def _run_notes(group: Group, titles: Mapping[str, str]) -> Iterator[str]:
    runs = {titles[row.entry.label]: row.figures.num_runs for row in group.rows}
    if max(runs.values()) == 1:
        return
    counts = ", ".join(f"{count} of {title}" for title, count in runs.items())
    if len(set(runs.values())) == 1:
        counts = f"{max(runs.values())} of each method"
    yield f"± is the standard deviation over runs: {counts}"


def _published_speed_note(
    group: Group, titles: Mapping[str, str], baseline: PublishedBaseline
) -> str:
    speeds = {
        titles[row.entry.label]: row.figures.figure(OVERALL, "tokens_per_second")
        for row in group.rows
    }
    ratios = ", ".join(
        f"{title} {figure_text(speed)} ({figure_text(speed / baseline.tokens_per_second, unit='x')})"
        for title, speed in speeds.items()
    )
    return (
        f"Tokens/s as Spec-Bench counts, and over the {baseline.tokens_per_second:.2f} of plain "
        f"decoding of {baseline.model} on {baseline.device} as published ({baseline.source}); that "
        f"is another machine, so not a speed-up of the method: {ratios}"
    )
