"""The tables of pages, each made from stored files alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from evaluation.leaderboard import Leaderboard, text_of
from evaluation.reporting.benchmark_reports import read_benchmark
from evaluation.reporting.leaderboard_tables import batch_tables
from evaluation.reporting.notes import alarms
from evaluation.reporting.tables import bounds_text, figure_text, markdown_table
from evaluation.reporting.titles import entry_titles, method_title, options_text, task_title
from evaluation.scoring.figures import CODE, OVERALL
from evaluation.scoring.groups import Entry, Group, Measured
from model.commands.known_models import KNOWN_MODELS, MODELS_FOLDER
from scripts.results.pack import groups_of

# Options that say how many nodes a step drafts.
SIZES = ("num_nodes", "num_pred_tokens")
# An option that names a tree, of another size each.
TREE = "tree_version"
# Cached tokens of the costs that are shown, or the nearest that a report has.
CONTEXT = 512
MODEL_TITLES = {
    "demo/model": "Demo model, 7M",
    **{f"{MODELS_FOLDER.name}/{name}": known.title for name, known in KNOWN_MODELS.items()},
}


def summary(packs: Sequence[Path]) -> str:
    """Return methods against groups: tokens a second, speed-up with its interval, mean accepted tokens."""
    groups = _groups(packs)
    by_title = [_by_title(group) for group in groups]
    names = list(dict.fromkeys(title for rows in by_title for title in rows))
    header = ["method", *map(_column, groups)]
    body = [
        [
            name,
            *(
                _cell(group, rows[name]) if name in rows else "-"
                for group, rows in zip(groups, by_title, strict=True)
            ),
        ]
        for name in names
    ]
    captions = (f"- {line}" for line in _captions(groups))
    return "\n".join((*captions, "", markdown_table(header, body)))


def tasks(packs: Sequence[Path]) -> str:
    """Return speed-ups by task as Spec-Bench counts, and of decoding alone, for each method of each group."""
    groups = _groups(packs)
    columns = list(
        dict.fromkeys(
            task for group in groups for task in group.tasks if task not in (OVERALL, CODE)
        )
    )
    header = ["model", "method", *map(task_title, columns), "decoding"]
    body = [
        [
            _column(group),
            title,
            *(figure_text(row.figures.figure(task, "speedup"), unit="x") for task in columns),
            figure_text(row.figures.figure(OVERALL, "decode_speedup"), unit="x"),
        ]
        for group in groups
        for title, row in _by_title(group).items()
        if row.entry is not group.baseline
    ]
    return markdown_table(header, body, num_text_columns=2)


def report(packs: Sequence[Path]) -> str:
    """Return the leaderboard's tables and notes of each group."""
    texts = []
    for groups, folder in map(groups_of, packs):
        board = Leaderboard(groups, published=None, benchmarks=[], left_out=[], paths=[])
        texts.append(text_of(board).replace(folder, ""))
    return "\n\n".join(texts)


def batches(packs: Sequence[Path]) -> str:
    """Return tokens a second of each method by batch size, beside the baseline's of that size and one by one."""
    found = batch_tables(_groups(packs))
    return "\n\n".join(part for table in found for part in (table.caption, table.markdown))


def nodes(packs: Sequence[Path]) -> str:
    """Return methods against drafted nodes: tokens a second, speed-up with its interval, mean accepted tokens.

    Columns are the numbers of nodes that methods were given. One without such an option (a tree, a window) stands
    in the first column that holds the nodes of its mean step.
    """
    parts = []
    for group in _groups(packs):
        rows = [row for row in group.rows if row.entry is not group.baseline]
        given = sorted({size for row in rows if (size := _given_size(row.entry))})
        cells: dict[str, dict[int, str]] = {}
        for row in rows:
            by_size = cells.setdefault(_name_without_size(row.entry), {})
            size = _given_size(row.entry) or _mean_size(row.entry, given)
            by_size[size] = "; ".join(filter(None, (by_size.get(size), _cell(group, row))))
        sizes = sorted({size for by_size in cells.values() for size in by_size})
        body = [
            [name, *(by_size.get(size, "-") for size in sizes)] for name, by_size in cells.items()
        ]
        header = ["method", *(f"{size} nodes" for size in sizes)]
        parts += [f"- {line}" for line in _captions([group])]
        parts += ["", markdown_table(header, body), ""]
    return "\n".join(parts).rstrip("\n")


def costs(reports: Sequence[Path]) -> str:
    """Return milliseconds of a pass by nodes, from reports of `scripts.benchmark`, and relative to one node."""
    columns = {}
    for benchmark in map(read_benchmark, reports):
        context = min(benchmark.costs["context"], key=lambda found: abs(found - CONTEXT))
        of_context = benchmark.costs[benchmark.costs["context"] == context]
        times = of_context.set_index("num_nodes")["milliseconds"]
        columns[f"{benchmark.conditions}, context {context}"] = times
    body = []
    for count in sorted({count for times in columns.values() for count in times.index}):
        cells = [
            f"{times[count]:.2f} ({times[count] / times[1]:.2f})" if count in times.index else "-"
            for times in columns.values()
        ]
        body.append([str(count), *cells])
    return markdown_table(["nodes", *columns], body, num_text_columns=0)


TABLES: Mapping[str, Callable[[Sequence[Path]], str]] = {
    "summary": summary,
    "tasks": tasks,
    "report": report,
    "batches": batches,
    "nodes": nodes,
    "costs": costs,
}


def _name_without_size(entry: Entry) -> str:
    """Return a method's title with the options in words that tell its entries apart, those of a size left out."""
    words = {
        name: value
        for name, value in entry.differing.items()
        if isinstance(value, bool) or (not isinstance(value, int) and name != TREE)
    }
    return ", ".join(filter(None, (method_title(entry.method), options_text(words, entry.method))))


def _given_size(entry: Entry) -> int | None:
    return next(
        (size for name in SIZES if isinstance(size := entry.differing.get(name), int)), None
    )


def _mean_size(entry: Entry, given: Sequence[int]) -> int:
    """Return the first of these sizes that holds the drafted nodes of an entry's mean step, or their number."""
    choices = [choice for file in entry.files for row in file.rows for choice in row.choices]
    num_steps = sum(len(choice.accept_lengths) for choice in choices)
    mean = sum(sum(choice.draft_tokens) for choice in choices) / max(1, num_steps)
    return next((size for size in given if mean <= size), math.ceil(mean))


def _groups(packs: Sequence[Path]) -> list[Group]:
    return [group for path in packs for group in groups_of(path)[0]]


def _by_title(group: Group) -> dict[str, Measured]:
    titles = entry_titles(group)
    return {titles[row.entry.label].long: row for row in group.rows}


def _column(group: Group) -> str:
    facts = group.facts
    model = facts["model"].partition("@")[0]
    threads = f"{facts['threads']} thread{'s' * (facts['threads'] != '1')}"
    return f"{MODEL_TITLES.get(model, model)}, {facts['dtype']}, {threads}"


def _captions(groups: Sequence[Group]) -> list[str]:
    """Return a line for all columns of the same conditions, with the noise of each."""
    alike: dict[str, list[Group]] = {}
    for group in groups:
        alike.setdefault(_conditions(group), []).append(group)
    lines = []
    for conditions, of_them in alike.items():
        floors = [group.floor_interval("exact_speedup") for group in of_them]
        known = ", ".join(bounds_text(floor) for floor in floors if floor.is_known)
        noise = f" Noise (one run of vanilla over another): {known}." if known else ""
        columns = "; ".join(map(_column, of_them))
        lines.append(f"{columns}: {conditions}.{noise}")
    return [*lines, *(f"**{alarm}.**" for alarm in alarms(groups))]


def _conditions(group: Group) -> str:
    facts = group.facts
    counts = group.rows[0].figures.mean.drop(index=OVERALL)["questions"].sum()
    num_runs = max(row.figures.num_runs for row in group.rows)
    runs = f" x {num_runs} runs" if num_runs > 1 else ""
    titles = entry_titles(group)
    differing = ", ".join(
        f"{titles[row.entry.label].long} {row.equality}"
        for row in group.rows
        if row.equality.num_differing
    )
    return (
        f"{counts:.0f} questions of {facts['bench']}{runs}, at most {facts['max_new_tokens']} new tokens, "
        f"{facts['device']}, commit {facts['commit']}. Answers that differ from vanilla's: {differing or 'none'}"
    )


def _cell(group: Group, row: Measured) -> str:
    figures = row.figures
    speedup = figure_text(figures.figure(OVERALL, "exact_speedup"), unit="x")
    interval = figures.interval(OVERALL, "exact_speedup")
    if row.entry is not group.baseline and interval.is_known:
        speedup += f" {bounds_text(interval)}"
    if row.equality.is_broken:
        speedup += ", not lossless"
    rate = figures.figure(OVERALL, "exact_tokens_per_second")
    mat = figures.figure(OVERALL, "exact_mean_accepted_tokens")
    return f"{rate:.1f} tokens/s, {speedup}, MAT {mat:.2f}"
