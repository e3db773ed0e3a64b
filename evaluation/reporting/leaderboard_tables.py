"""The leaderboard's tables and records of measured groups.

All formats of the command (`leaderboard.py`) are made from these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from evaluation.answers.row import AnswerRow
from evaluation.answers.step_figures import PARTS, acceptance_rate, time_shares
from evaluation.reporting.memory_age import memory_table
from evaluation.reporting.notes import group_caption
from evaluation.reporting.tables import Cell, Table, csv_of, figure_cell
from evaluation.reporting.titles import (
    counted_title,
    entry_titles,
    group_facts,
    short_titles,
    task_title,
)
from evaluation.scoring.comparable import neighbours, paired_files
from evaluation.scoring.figures import (
    CODE,
    EXACT_FIGURES,
    EXACT_SPEEDUPS,
    OVERALL,
    SPEC_BENCH_TASKS,
    in_task_order,
    quotient,
)
from evaluation.scoring.groups import Group, Measured, condition_names
from evaluation.scoring.intervals import UNKNOWN, Interval
from evaluation.scoring.per_question import SPEED_BENCH_MARK, pair_questions

OVERVIEW_FACTS = ("Model", "Questions asked", "Precision", "Device")
# Of the frames of `evaluation.scoring.per_question`.
QUESTION_COLUMNS = ("tokens", "steps", "accepted", "seconds", "decode_seconds", "cpu_seconds")
# Columns of the CSV beside those of measured rows.
OTHER_COLUMNS = ("kind", "source", "conditions", "differs", "note")
METHOD, MAT, OVERALL_TITLE = "Models", "#Mean accepted tokens", "Overall"
CACHED = (
    "Prompts from a prefix cache cost less than those before them: start the server without one"
)
QUANTILES = (0.5, 0.9)


def group_tables(group: Group, pairs: Table) -> list[Table]:
    """Return a group's tables: as Spec-Bench counts, exact figures, its `pairs_table`, and acceptance."""
    titles = short_titles(group)
    served = {
        titles[row.entry.label]: [answer for file in row.entry.files for answer in file.rows]
        for row in group.rows
        if row.entry.files[0].record.is_served
    }
    further = (pairs, drafting_table(group), memory_table(group), serving_table(served))
    counted = group_table(group, lambda task: counted_title(task, [group]))
    return [counted, exact_table(group), *(table for table in further if table.rows)]


def group_table(group: Group, title_of: Callable[[str], str] = task_title) -> Table:
    """Return a group's table as Spec-Bench counts: a method a row, best overall speed-up first."""
    occurring = [task for task in group.tasks if task != OVERALL]
    # Some of SPEED-Bench's categories have the names of Spec-Bench's tasks.
    is_speed_bench = SPEED_BENCH_MARK in occurring
    has_spec_bench = not (is_speed_bench or set(occurring).isdisjoint(SPEC_BENCH_TASKS))
    columns = in_task_order([*occurring, *(SPEC_BENCH_TASKS if has_spec_bench else ())])
    titles = short_titles(group)
    rows = [
        [
            Cell(titles[row.entry.label]),
            *(_figure(row, task, "speedup", "x") for task in columns),
            _figure(row, OVERALL, "mean_accepted_tokens"),
            _speedup(row, group, "speedup"),
            _figure(row, OVERALL, "tokens_per_second"),
        ]
        for row in group.rows
    ]
    is_retokenised = any(file.tokenizer is not None for file in group.baseline.files)
    counted = "" if is_retokenised else ", by counted tokens"
    caption = f"Speed-up over {baseline_title(group)}, as Spec-Bench counts{counted}"
    header = [METHOD, *map(title_of, columns), MAT, OVERALL_TITLE, "Tokens/s"]
    return Table(caption, header, rows, first=(OVERALL_TITLE, MAT, "Tokens/s"))


def exact_table(group: Group) -> Table:
    """Return a group's exact figures; CPU time where the answers have it."""
    base = baseline_title(group)
    titles = short_titles(group)
    header = [METHOD, "Speed-up", "Tokens/s", "Decode speed-up", "Decode tokens/s", "MAT"]
    header += ["Other answers", "Break-even MAT", "CPU ms / token", f"CPU / {base}"]
    rows = [
        [
            Cell(titles[row.entry.label]),
            _speedup(row, group, "exact_speedup"),
            _figure(row, OVERALL, "exact_tokens_per_second"),
            _speedup(row, group, "decode_speedup"),
            _figure(row, OVERALL, "decode_tokens_per_second"),
            _figure(row, OVERALL, "exact_mean_accepted_tokens"),
            _other_answers(row),
            _figure(row, OVERALL, "break_even_mat"),
            _figure(row, OVERALL, "cpu_ms_per_token"),
            _figure(row, OVERALL, "cpu_ratio", "x"),
        ]
        for row in group.rows
    ]
    caption = f"Exact figures over {base}: every token weighs the same; MAT is tokens a step, every step counted"
    return _without_empty(Table(caption, header, rows))


def pairs_table(group: Group) -> Table:
    """Return each method over the next slower one, the baseline left out; no row where there are no two."""
    titles = short_titles(group)
    rows = []
    for row, other in neighbours(group):
        names = [Cell(titles[entry.label]) for entry in (row.entry, other)]
        verdict = Cell(group.pair_verdict(row, other).value)
        rows.append([*names, verdict, _speedup(row, group, "exact_speedup")])
    header = [METHOD, "Over", "Verdict", "Speed-up"]
    return Table("Each method over the next one", header, rows, num_text_columns=3)


def drafting_table(group: Group) -> Table:
    """Return the table of accepted drafts and of the parts of a step's time; no row if not recorded."""
    titles = short_titles(group)
    header = [METHOD, "Accepted %", *(f"{part.capitalize()} %" for part in PARTS)]
    rows = [
        [Cell(titles[row.entry.label]), *(figure_cell(100 * it) for it in steps.values())]
        for row in group.rows
        if not all(map(math.isnan, (steps := _step_figures(row)).values()))
    ]
    caption = "Drafted tokens that were accepted, and each part's share of a step's time"
    return Table(caption, header, rows)


def baseline_title(group: Group) -> str:
    return short_titles(group)[group.baseline.label]


def serving_table(rows: Mapping[str, Sequence[AnswerRow]]) -> Table:
    """Return a line for each server's rows, by its name: over all turns of rows that did not fail."""
    lines, is_cached = [], False
    for name, answered in rows.items():
        choices = [choice for row in answered if not row.is_failed for choice in row.choices]
        turns = [
            turn
            for choice in choices
            for turn in zip(
                choice.time_to_first_token, choice.wall_time, choice.new_tokens, strict=False
            )
        ]
        waits = [first for first, _, _ in turns]
        # Of each turn the mean seconds between tokens.
        gaps = [(wall - first) / (count - 1) for first, wall, count in turns if count > 1]
        tokens = sum(sum(choice.new_tokens) for choice in choices)
        prompt = sum(sum(choice.prompt_tokens) for choice in choices)
        cached = quotient(sum(sum(choice.cached_tokens) for choice in choices), prompt)
        is_cached = is_cached or cached > 0
        figures = [
            quotient(tokens, sum(choice.seconds for choice in choices)),
            *(1000 * it for it in np.quantile(waits or math.nan, QUANTILES)),
            *(1000 * it for it in np.quantile(gaps or math.nan, QUANTILES)),
            quotient(tokens, sum(choice.num_steps for choice in choices)),
            100 * cached,
        ]
        lines.append([Cell(name), Cell(str(len(turns)), len(turns)), *map(figure_cell, figures)])
    header = ["Server", "Requests", "Tokens/s", "First token, ms", "90%", "Between tokens, ms"]
    header += ["90% ", "Tokens a step", "Prompt cached %"]
    caption = "What clients of servers waited: medians and 90th percentiles over turns"
    return Table(caption, header, lines, notes=[CACHED] if is_cached else [])


def overview_table(groups: Sequence[Group]) -> Table:
    """Return the methods of all groups in one table; each speed-up is over its own group's baseline."""
    rows = [
        [
            Cell(titles[row.entry.label]),
            *(Cell(facts.get(name, "")) for name in OVERVIEW_FACTS),
            _figure(row, OVERALL, "mean_accepted_tokens"),
            _figure(row, OVERALL, "speedup", "x"),
            _figure(row, OVERALL, "tokens_per_second"),
        ]
        for group, facts in zip(groups, group_facts(groups), strict=True)
        for titles in [short_titles(group)]
        for row in group.rows
    ]
    header = [METHOD, *OVERVIEW_FACTS, MAT, OVERALL_TITLE, "Tokens/s"]
    caption = "Every method of every group; compare speed-ups within a group only"
    text_columns = 1 + len(OVERVIEW_FACTS)
    return Table(caption, header, rows, text_columns, first=(OVERALL_TITLE, MAT, "Tokens/s"))


def batch_tables(groups: Sequence[Group]) -> list[Table]:
    """Return a table over batch sizes for the groups that differ in nothing else; none where all are 1."""
    place = condition_names().index("batch_size")
    alike: dict[tuple[str, ...], dict[int, Group]] = {}
    for group in groups:
        if (size := group.conditions[place]).isdecimal():
            others = group.conditions[:place] + group.conditions[place + 1 :]
            alike.setdefault(others, {})[int(size)] = group
    return [_batch_table(by_size) for by_size in alike.values() if max(by_size) > 1]


def _batch_table(by_size: Mapping[int, Group]) -> Table:
    """Return the methods of groups by batch size: each over the baseline of that size, and over that one by one."""
    smallest = by_size[min(by_size)]
    base, alone = baseline_title(smallest), math.nan
    if 1 in by_size:
        (row,) = (row for row in smallest.rows if row.entry is smallest.baseline)
        alone = row.figures.figure(OVERALL, "exact_tokens_per_second")
    header = [METHOD, "Batch size", "Tokens/s", f"Over {base} of that size"]
    header += ["Decode speed-up", f"Over {base} one by one", "MAT"]
    header += ["Other answers", "Texts under way"]
    rows = []
    for size, group in sorted(by_size.items()):
        titles = entry_titles(group)
        for row in group.rows:
            speed = row.figures.figure(OVERALL, "exact_tokens_per_second")
            cells = [
                Cell(titles[row.entry.label].long),
                Cell(str(size), size),
                _figure(row, OVERALL, "exact_tokens_per_second"),
                _speedup(row, group, "exact_speedup"),
                _speedup(row, group, "decode_speedup"),
                figure_cell(speed / alone, unit="x"),
                _figure(row, OVERALL, "exact_mean_accepted_tokens"),
                _other_answers(row),
                figure_cell(_texts_under_way(row)),
            ]
            rows.append(cells)
    names = list(dict.fromkeys(row[0].text for row in rows))
    rows.sort(key=lambda row: (names.index(row[0].text), row[1].value))
    facts = group_facts([smallest])[0]
    where = "; ".join(facts[name] for name in OVERVIEW_FACTS if name in facts)
    return _without_empty(Table(f"By batch size: {where}", header, rows))


def spec_bench_csv(groups: Sequence[Group]) -> str:
    """Return the tables of all groups as one CSV with Spec-Bench's columns, all digits."""
    records = [
        record | {"Measured": group_caption(facts)}
        for group, facts in zip(groups, group_facts(groups), strict=True)
        for record in group_table(group).records
    ]
    return csv_of(pd.DataFrame(records).drop(columns="Tokens/s"))


def questions_csv(groups: Sequence[Group]) -> str:
    """Return a line for each question, method and run: its figures and the baseline's beside them."""
    names = [prefix + name for name in QUESTION_COLUMNS for prefix in ("", "base_")]
    records = []
    for group, row in [(one, row) for one in groups for row in one.rows]:
        for run, (file, base) in enumerate(paired_files(row.entry, group.baseline)):
            pairs = pair_questions(file.frame, base.frame, (str(file.path), str(base.path)))
            head = group.facts | {"method": row.entry.label, "run": run}
            shown = pairs[["question_id", "task", "is_used", *names]]
            records += [head | pair for pair in shown.to_dict("records")]
    return csv_of(pd.DataFrame(records))


def measured_rows(group: Group, baseline: pd.Series | None) -> Iterator[dict[str, Any]]:
    """Yield a flat record of each method: conditions, counts, figures with all their digits.

    Every record has the six tasks and code, so that the records of several groups line up.
    """
    tasks = in_task_order([*group.tasks, *SPEC_BENCH_TASKS, CODE, OVERALL])
    for measured in group.rows:
        figures = measured.figures
        counts = figures.mean.drop(index=OVERALL, errors="ignore")
        head: dict[str, Any] = group.facts | {
            "method": measured.entry.label,
            "is_baseline": measured.entry is group.baseline,
            "runs": figures.num_runs,
            "questions": int(counts["questions"].sum()),
            "left_out": int(counts["left_out"].sum()),
        }
        row: dict[str, Any] = {}
        for name in ("mean_accepted_tokens", "tokens_per_second", *EXACT_FIGURES):
            row[name] = figures.figure(OVERALL, name)
            row[f"{name}_std"] = figures.spread(OVERALL, name)
        intervals = {name: figures.interval(OVERALL, name) for name in EXACT_SPEEDUPS}
        intervals |= {f"{name}_noise_floor": group.floor_interval(name) for name in EXACT_SPEEDUPS}
        for name, interval in intervals.items():
            row[f"{name}_low"], row[f"{name}_high"] = interval
        verdict = group.verdict(measured).value
        row["verdict"] = None if head["is_baseline"] else verdict
        equality = measured.equality
        row["compared_answers"] = equality.num_compared
        row["other_answers"] = equality.num_differing if equality.num_compared else math.nan
        row["other_answers_near_ties"] = (
            math.nan if equality.num_ties is None else equality.num_ties
        )
        row["is_lossless"] = equality.is_lossless
        row |= _step_figures(measured)
        row["texts_under_way"] = _texts_under_way(measured)
        base_speed = math.nan if baseline is None else baseline["tokens_per_second"]
        row["over_published_baseline"] = row["tokens_per_second"] / base_speed
        columns: dict[str, float] = {}
        endings = ("", "_std", "_low", "_high")
        for task in tasks:
            values = (
                figures.figure(task, "speedup"),
                figures.spread(task, "speedup"),
                *figures.interval(task, "speedup"),
            )
            # A task may have any name: it is `task NAME` where its columns are taken.
            taken = {*columns, *head, *row, *OTHER_COLUMNS}
            name = f"task {task}" if taken & {task + ending for ending in endings} else task
            columns |= {name + ending: it for ending, it in zip(endings, values, strict=True)}
        yield head | columns | row


def csv_text(
    measured: Sequence[dict[str, Any]],
    published: Sequence[dict[str, Any]],
    left_out: Sequence[str] = (),
) -> str:
    """Return all kinds of records as CSV, told apart by the column `kind`; `note` says why some are left out."""
    table = pd.DataFrame(measured)
    table.insert(0, "kind", "measured")
    # By records: pandas deprecates joining frames whose columns are empty on one side.
    records = table.to_dict("records") + [{"kind": "published", **row} for row in published]
    records += [{"kind": "left out", "note": reason} for reason in left_out]
    columns = [*table.columns, *(("source", "conditions", "differs") if published else ())]
    table = pd.DataFrame(records, columns=[*columns, *(["note"] if left_out else [])])
    # Counts stay whole numbers beside rows that have none.
    table = table.astype(dict.fromkeys(("runs", "questions", "left_out"), "Int64"))
    return csv_of(table)


def _figure(
    row: Measured, task: str, name: str, unit: str = "", interval: Interval = UNKNOWN
) -> Cell:
    figures = row.figures
    return figure_cell(figures.figure(task, name), figures.spread(task, name), unit, interval)


def _speedup(row: Measured, group: Group, name: str) -> Cell:
    """Return an overall speed-up with its interval; the baseline's has none."""
    is_baseline = row.entry is group.baseline
    interval = UNKNOWN if is_baseline else row.figures.interval(OVERALL, name)
    cell = _figure(row, OVERALL, name, "x", interval)
    return cell._replace(text=f"{cell.text} not lossless") if row.equality.is_broken else cell


def _other_answers(row: Measured) -> Cell:
    """Return how many answers are not the baseline's; none where nothing can be compared."""
    equality = row.equality
    return Cell(str(equality), equality.num_differing if equality.num_compared else math.nan)


def _without_empty(table: Table) -> Table:
    """Return a table without the columns of figures that no row has."""
    kept = [
        place
        for place in range(len(table.header))
        if place < table.num_text_columns
        or not all(math.isnan(row[place].value) for row in table.rows)
    ]
    header = [table.header[place] for place in kept]
    return table._replace(
        header=header, rows=[[row[place] for place in kept] for row in table.rows]
    )


def _step_figures(row: Measured) -> dict[str, float]:
    """Acceptance rate and each part's share of step time, over all runs; NaN where not recorded."""
    rows = [answer for file in row.entry.files for answer in file.rows]
    shares = time_shares(rows)
    return {"acceptance_rate": acceptance_rate(rows)} | {
        f"{part}_share": shares.get(part, math.nan) for part in PARTS
    }


def _texts_under_way(row: Measured) -> float:
    """Mean number of texts that were answered at a time: what all waited over what the run took."""
    choices = [
        choice for file in row.entry.files for answer in file.rows for choice in answer.choices
    ]
    seconds = sum(choice.seconds for choice in choices)
    return sum(sum(choice.wall_time) for choice in choices) / seconds if seconds else math.nan
