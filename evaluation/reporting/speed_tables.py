"""The tables of the speed command: a ruler's figures per task, and how drafting went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from evaluation.answers.row import AnswerRow
from evaluation.answers.step_figures import acceptance_rate, node_counts, source_counts, time_shares
from evaluation.reporting.tables import bounds_text, figure_text, markdown_table
from evaluation.reporting.titles import task_title
from evaluation.scoring.figures import INTERVALS, RunFigures

COUNTED = ("drafted", "accepted")


class Column(NamedTuple):
    """A figure in a table, with the speed-up's interval beside it if it has one."""

    title: str
    name: str
    unit: str = ""


class Ruler(NamedTuple):
    """A table of its own: how rows were counted, and the figures."""

    title: str
    counted: str
    columns: tuple[Column, ...]


RULERS = {
    "legacy": Ruler(
        "Legacy ruler (Spec-Bench's arithmetic)",
        "rows",
        (
            Column("#Mean accepted tokens", "mean_accepted_tokens"),
            Column("Tokens/s", "tokens_per_second"),
            Column("Baseline tokens/s", "base_tokens_per_second"),
            Column("Speed-up", "speedup", "x"),
        ),
    ),
    "exact": Ruler(
        "Exact ruler (token-weighted, sound rows on both sides)",
        "questions",
        (
            Column("MAT", "exact_mean_accepted_tokens"),
            Column("Tokens/s", "exact_tokens_per_second"),
            Column("Baseline tokens/s", "exact_base_tokens_per_second"),
            Column("Speed-up", "exact_speedup", "x"),
            Column("Decode tokens/s", "decode_tokens_per_second"),
            Column("Decode speed-up", "decode_speedup", "x"),
            Column("Break-even MAT", "break_even_mat"),
            Column("CPU ms / token", "cpu_ms_per_token"),
            Column("Baseline CPU ms / token", "base_cpu_ms_per_token"),
            Column("CPU ratio", "cpu_ratio", "x"),
        ),
    ),
}


def ruler_table(figures: RunFigures, ruler: Ruler) -> str:
    """Return a ruler's table, one row a task, speed-ups with intervals; CPU time where the answers have it."""
    columns = [
        column
        for column in ruler.columns
        if "cpu" not in column.name or figures.mean[column.name].notna().any()
    ]
    header = ["Task", "Questions"]
    for column in columns:
        header += [column.title] + (["95%"] if column.name in INTERVALS else [])
    rows = []
    for task in figures.mean.index:
        row = [task_title(task), f"{figures.figure(task, ruler.counted):.0f}"]
        for column in columns:
            value, spread = figures.figure(task, column.name), figures.spread(task, column.name)
            row.append(figure_text(value, spread, column.unit))
            if column.name in INTERVALS:
                row.append(_interval_cell(figures, task, column.name))
        rows.append(row)
    return markdown_table(header, rows)


def _interval_cell(figures: RunFigures, task: str, name: str) -> str:
    """Return the interval, marked where it does not tell the method from the baseline."""
    interval = figures.interval(task, name)
    if math.isnan(interval.low):
        return "-"
    return bounds_text(interval) + ("" if interval.excludes_one else " not different")


def drafting_report(rows: Sequence[AnswerRow]) -> dict[str, Any]:
    """Return acceptance and time shares of the drafts; NaN and empty lists where rows have no counts."""
    nodes = node_counts(rows)
    return {
        "acceptance_rate": acceptance_rate(rows),
        **{
            by: nodes.groupby(by)[list(COUNTED)].sum().reset_index().to_dict("records")
            for by in ("depth", "rank")
        },
        "source": source_counts(rows).reset_index().to_dict("records"),
        "time_shares": time_shares(rows),
    }


def drafting_text(drafting: dict[str, Any]) -> str:
    if not drafting["time_shares"]:
        return "Drafting: the answers have no counts of it"
    shares = [f"{part} {100 * share:.1f}%" for part, share in drafting["time_shares"].items()]
    rate = _percent(drafting["acceptance_rate"], 1) if drafting["depth"] else "-"
    parts = [f"Drafting: {rate} of drafted nodes accepted; time of a step: {', '.join(shares)}"]
    for by in ("depth", "rank", "source"):
        rows = [
            [
                *(str(line[key]) for key in (by, *COUNTED)),
                _percent(line["accepted"], line["drafted"]),
            ]
            for line in drafting[by]
        ]
        if rows:
            parts.append(markdown_table([by.capitalize(), "Drafted", "Accepted", "Rate"], rows))
    return "\n\n".join(parts)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%"
