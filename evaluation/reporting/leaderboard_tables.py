"""The leaderboard's tables and rows: measured groups, published figures, rows for Spec-Bench's page.

The command (``leaderboard.py``) writes them as Markdown, CSV, JSON and HTML; they are made once,
here, so that all of these say the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from evaluation.answers.step_figures import PARTS, acceptance_rate, time_shares
from evaluation.reporting.published import PublishedBaseline, published_baseline
from evaluation.reporting.tables import Cell, Table, figure_cell, task_title
from evaluation.scoring.comparable import SPEC_BENCH, Group, Measured
from evaluation.scoring.figures import CODE, EXACT_FIGURES, OVERALL, SPEC_BENCH_TASKS, in_task_order
from evaluation.scoring.intervals import UNKNOWN

LAST_TITLES = ("#Mean Accepted Tokens", "Overall", "Tokens/s")
# Titles and order of the tables in Spec-Bench's Leaderboard.md.
SPEC_BENCH_TITLES = (
    *("Models", "Multi-turn Conversation", "Translation", "Summa-rization", "Question Answering"),
    *("Mathematical Reasoning", "Retrieval-aug. Generation", "#Mean Accepted Tokens", "Overall"),
)


def baseline_of(group: Group, published: pd.DataFrame | None) -> PublishedBaseline | None:
    """Return the published plain decoding that a group's tokens/s compare with: Spec-Bench, greedy."""
    is_like_it = group.facts["bench"] == SPEC_BENCH and group.facts["temperature"] in ("0", "0.0")
    if published is None or not is_like_it:
        return None
    return published_baseline(published, group.facts["model"])


def group_table(group: Group, baseline: PublishedBaseline | None) -> Table:
    """Return a group's table: a method a row, best overall speed-up first."""
    occurring = [task for task in group.tasks if task != OVERALL]
    has_spec_bench = not set(occurring).isdisjoint(SPEC_BENCH_TASKS)
    columns = in_task_order([*occurring, *(SPEC_BENCH_TASKS if has_spec_bench else ())])
    header = ["Method", *map(task_title, columns), *LAST_TITLES]
    rows = []
    for row in group.rows:
        num_runs = row.figures.num_runs
        cells = [
            Cell(row.entry.label + (f" ({num_runs} runs)" if num_runs > 1 else "")),
            *(_figure(row, task, "speedup", "x") for task in columns),
            _figure(row, OVERALL, "mean_accepted_tokens"),
            _speedup(row, group, "speedup"),
            _figure(row, OVERALL, "tokens_per_second"),
        ]
        if baseline:
            cells.append(figure_cell(cells[-1].value / baseline.tokens_per_second, unit="x"))
        rows.append(cells)
    if baseline:
        header.append(f"Tokens/s / published {baseline.device}")
    return Table(f"Speed-up over {group.baseline.label}, as Spec-Bench counts", header, rows)


def exact_table(group: Group) -> Table:
    """Return a group's exact figures, what its drafts came to, and where a step's time went."""
    header = ["Method", "Speed-up", "Decode speed-up", "Decode tokens/s", "MAT", "Break-even MAT"]
    header += ["Accepted %", *(f"{part.capitalize()} %" for part in PARTS)]
    rows = []
    for row in group.rows:
        steps = _step_figures(row)
        rows.append(
            [
                Cell(row.entry.label),
                _speedup(row, group, "exact_speedup"),
                _speedup(row, group, "decode_speedup"),
                _figure(row, OVERALL, "decode_tokens_per_second"),
                _figure(row, OVERALL, "exact_mean_accepted_tokens"),
                _figure(row, OVERALL, "break_even_mat"),
                *(figure_cell(100 * value) for value in steps.values()),
            ]
        )
    return Table(
        f"Exact figures over {group.baseline.label}: every token weighs the same", header, rows
    )


def group_notes(group: Group, baseline: PublishedBaseline | None) -> list[str]:
    """Return a line for what limits a group's figures: left-out questions, intervals, machines."""
    notes = [f"{row.entry.label}: {note}" for row in group.rows for note in row.notes]
    alike = [
        row.entry.label
        for row in group.rows
        if row.entry is not group.baseline
        and not row.figures.is_different(OVERALL, "exact_speedup")
    ]
    if alike:
        name = group.baseline.label
        notes.append(
            f"not told from {name} by the interval of the exact speed-up: {', '.join(alike)}"
        )
    if baseline:
        notes.append(
            f"Tokens/s / published {baseline.device}: over {baseline.tokens_per_second:.2f} tokens/s "
            f"of plain decoding of {baseline.model} there, as published ({baseline.source}); another "
            "machine, so not a speed-up of the method"
        )
    return notes


def overview_table(groups: Sequence[Group]) -> Table:
    """Return the methods of all groups in one table; its speed-ups are each over its own baseline."""
    names = ("model", "bench", "dtype", "device", "commit")
    header = ["Method", *(name.capitalize() for name in names), *LAST_TITLES]
    rows = [
        [
            Cell(row.entry.label),
            *(Cell(group.facts[name]) for name in names),
            _figure(row, OVERALL, "mean_accepted_tokens"),
            _figure(row, OVERALL, "speedup", "x"),
            _figure(row, OVERALL, "tokens_per_second"),
        ]
        for group in groups
        for row in group.rows
    ]
    caption = "Every method of every group; compare speed-ups within a group only"
    return Table(caption, header, rows, num_text_columns=1 + len(names))


def spec_bench_table(group: Group) -> Table:
    """Return the rows of a Spec-Bench group with the columns of Spec-Bench's Leaderboard.md.

    The baseline, which has no row there, is left out.
    """
    rows = [
        [
            Cell(row.entry.label),
            *(_figure(row, task, "speedup", "x", spread=False) for task in SPEC_BENCH_TASKS),
            _figure(row, OVERALL, "mean_accepted_tokens", spread=False),
            _figure(row, OVERALL, "speedup", "x", spread=False),
        ]
        for row in group.rows
        if row.entry is not group.baseline
    ]
    return Table(group.caption, list(SPEC_BENCH_TITLES), rows)


def measured_rows(group: Group, baseline: PublishedBaseline | None) -> Iterator[dict[str, Any]]:
    """Yield a flat record of each method: conditions, counts, figures with all their digits.

    Every record has the six tasks and code, so that the records of several groups line up.
    """
    tasks = in_task_order([*group.tasks, *SPEC_BENCH_TASKS, CODE, OVERALL])
    for measured in group.rows:
        figures = measured.figures
        counts = figures.mean.drop(index=OVERALL, errors="ignore")
        row: dict[str, Any] = group.facts | {
            "method": measured.entry.label,
            "is_baseline": measured.entry is group.baseline,
            "runs": figures.num_runs,
            "questions": int(counts["questions"].sum()),
            "left_out": int(counts["left_out"].sum()),
        }
        for task in tasks:
            row[task] = figures.figure(task, "speedup")
            row[f"{task}_std"] = figures.spread(task, "speedup")
            row[f"{task}_low"], row[f"{task}_high"] = figures.interval(task, "speedup")
        for name in ("mean_accepted_tokens", "tokens_per_second", *EXACT_FIGURES):
            row[name] = figures.figure(OVERALL, name)
            row[f"{name}_std"] = figures.spread(OVERALL, name)
        for name in ("exact_speedup", "decode_speedup"):
            row[f"{name}_low"], row[f"{name}_high"] = figures.interval(OVERALL, name)
        row |= _step_figures(measured)
        base_speed = baseline.tokens_per_second if baseline else math.nan
        row["over_published_baseline"] = row["tokens_per_second"] / base_speed
        yield row


def published_tables(published: pd.DataFrame) -> Iterator[Table]:
    """Yield a table for each source and device of published figures."""
    for (source, device), rows in published.groupby(["source", "device"], sort=False):
        columns = [*SPEC_BENCH_TASKS] + ([CODE] if rows[CODE].notna().any() else [])
        header = ["Method", "Model", *map(task_title, columns), *LAST_TITLES]
        table = [
            [Cell(row["method"]), Cell(row["model"])]
            + [figure_cell(row[task], unit="x") for task in columns]
            + [figure_cell(row["mean_accepted_tokens"]), figure_cell(row[OVERALL], unit="x")]
            + [figure_cell(row["tokens_per_second"])]
            for row in rows.to_dict("records")
        ]
        yield Table(f"{device}, published by: {source}", header, table, num_text_columns=2)


def published_rows(published: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the published figures as records, in order."""
    return [{str(key): value for key, value in row.items()} for row in published.to_dict("records")]


def csv_text(measured: Sequence[dict[str, Any]], published: Sequence[dict[str, Any]]) -> str:
    """Return both kinds of records as CSV, told apart by the column ``kind``."""
    table = pd.DataFrame(measured)
    table.insert(0, "kind", "measured")
    if not published:
        return table.to_csv(index=False, lineterminator="\n")
    # Through records: joining frames whose columns are empty on one side is deprecated in pandas.
    records = table.to_dict("records") + [{"kind": "published", **row} for row in published]
    table = pd.DataFrame(records, columns=[*table.columns, "source"])
    # Counts stay whole numbers beside rows that have none.
    table = table.astype(dict.fromkeys(("runs", "questions", "left_out"), "Int64"))
    return table.to_csv(index=False, lineterminator="\n")


def _figure(row: Measured, task: str, name: str, unit: str = "", spread: bool = True) -> Cell:
    deviation = row.figures.spread(task, name) if spread else math.nan
    return figure_cell(row.figures.figure(task, name), deviation, unit)


def _speedup(row: Measured, group: Group, name: str) -> Cell:
    """An overall speed-up with its interval, which the baseline over itself does not have."""
    interval = row.figures.interval(OVERALL, name)
    if row.entry is group.baseline:
        interval = UNKNOWN
    figures = row.figures
    return figure_cell(figures.figure(OVERALL, name), figures.spread(OVERALL, name), "x", interval)


def _step_figures(row: Measured) -> dict[str, float]:
    """Acceptance rate and each part's share of step time, over all runs; NaN where not recorded."""
    rows = [answer for file in row.entry.files for answer in file.rows]
    shares = time_shares(rows)
    return {"acceptance_rate": acceptance_rate(rows)} | {
        f"{part}_share": shares.get(part, math.nan) for part in PARTS
    }
