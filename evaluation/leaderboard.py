"""Merge answer files into one Spec-Bench-shaped table, with published figures below it.

Files are grouped by what must be equal for a speed-up to mean anything: model, device, dtype,
threads, token limit and temperature, as their sidecars say. In a group, every method is compared
with the group's own baseline, question by question (``metrics.py``). Files of the same method with
the same options are runs of it: run i is compared with run i of the baseline (from the first again
if the baseline has fewer), and mean ± deviation are shown. MBPP's answers fill the code column of
the Spec-Bench answers beside them; overall figures stay over Spec-Bench's questions.

Answer files without a sidecar (Spec-Bench's own, for instance) form a group of unknown conditions,
each under its model id.

Run:
    python -m evaluation.leaderboard data/demo/model_answer --markdown leaderboard.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from evaluation.command_line import OptionParser, UserError, run_command
from evaluation.groups import Group, Measured, group_answers, load_answers
from evaluation.metrics import CODE, OVERALL, SPEC_BENCH_TASKS, in_task_order
from evaluation.published import DEFAULT_DEVICES, PUBLISHED_DIR, read_published
from evaluation.tables import cell, json_line, markdown_table, task_title, write_whole

PUBLISHED_HEADING = "Published figures (other people's measurements, not ours)"
LAST_TITLES = ("#Mean Accepted Tokens", "Overall", "Tokens/s")
EXAMPLES = """\
examples:
  python -m evaluation.leaderboard data/demo/model_answer
  python -m evaluation.leaderboard run_1 run_2 run_3 --markdown table.md --csv table.csv
  python -m evaluation.leaderboard pld.jsonl plain.jsonl --base plain.jsonl --no-published
  python -m evaluation.leaderboard answers --published-device A100-80GB 3090
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and one line of JSON, write what is asked for; return the exit code.

    Args:
        argv: The command line's words; None takes the process's own.

    Raises:
        UserError: An input is not what it should be, or a group has no baseline.
    """
    options = _parse(argv)
    paths = _answer_paths(options.paths, options.base)
    _refuse_inputs([options.markdown, options.csv], paths)
    published = None
    if options.published:
        published = read_published(PUBLISHED_DIR, options.published_device, options.published_model)
    groups = group_answers([load_answers(path) for path in paths], options.base)
    text = "\n\n".join([*map(_group_text, groups), *_published_texts(published)])
    rows = [row for group in groups for row in _measured_rows(group)]
    published_rows = _published_rows(published)
    print(text)
    if options.markdown:
        write_whole(options.markdown, text + "\n")
    if options.csv:
        write_whole(options.csv, _csv_text(rows, published_rows))
    for path in filter(None, (options.markdown, options.csv)):
        print(f"wrote {path}", file=sys.stderr)
    print(json_line({"measured": rows, "published": published_rows}))
    return 0


def _group_text(group: Group) -> str:
    """A caption, the table, and a line for each run whose questions were not all used."""
    occurring = [task for task in group.tasks if task != OVERALL]
    has_spec_bench = not set(occurring).isdisjoint(SPEC_BENCH_TASKS)
    columns = in_task_order([*occurring, *(SPEC_BENCH_TASKS if has_spec_bench else ())])
    header = ["Method", *map(task_title, columns), *LAST_TITLES]
    table = [_cells(row, columns) for row in group.rows]
    notes = [f"{row.entry.label}: {note}" for row in group.rows for note in row.notes]
    parts = [group.caption, markdown_table(header, table), "\n".join(notes)]
    return "\n\n".join(filter(None, parts))


def _cells(row: Measured, columns: Sequence[str]) -> list[str]:
    def figure(task: str, name: str, unit: str = "") -> str:
        return cell(row.figures.figure(task, name), row.figures.spread(task, name), unit)

    num_runs = row.figures.num_runs
    return [
        row.entry.label + (f" ({num_runs} runs)" if num_runs > 1 else ""),
        *(figure(task, "speedup", "x") for task in columns),
        figure(OVERALL, "mean_accepted_tokens"),
        figure(OVERALL, "speedup", "x"),
        figure(OVERALL, "tokens_per_second"),
    ]


def _measured_rows(group: Group) -> Iterator[dict[str, Any]]:
    # Every row has the six columns and code, so that the rows of several groups line up.
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
        for name in ("mean_accepted_tokens", "tokens_per_second"):
            row[name] = figures.figure(OVERALL, name)
            row[f"{name}_std"] = figures.spread(OVERALL, name)
        yield row


def _published_texts(published: pd.DataFrame | None) -> Iterator[str]:
    if published is None:
        return
    yield f"## {PUBLISHED_HEADING}"
    for (source, device), rows in published.groupby(["source", "device"], sort=False):
        columns = [*SPEC_BENCH_TASKS] + ([CODE] if rows[CODE].notna().any() else [])
        header = ["Model", "Method", *map(task_title, columns), *LAST_TITLES]
        table = [
            [row["model"], row["method"]]
            + [cell(row[task], unit="x") for task in columns]
            + [cell(row["mean_accepted_tokens"]), cell(row[OVERALL], unit="x")]
            + [cell(row["tokens_per_second"])]
            for row in rows.to_dict("records")
        ]
        yield f"{device}, published by: {source}"
        yield markdown_table(header, table, num_text_columns=2)


def _published_rows(published: pd.DataFrame | None) -> list[dict[str, Any]]:
    if published is None:
        return []
    return [{str(key): value for key, value in row.items()} for row in published.to_dict("records")]


def _csv_text(rows: list[dict[str, Any]], published_rows: list[dict[str, Any]]) -> str:
    measured = pd.DataFrame(rows)
    measured.insert(0, "kind", "measured")
    if not published_rows:
        return measured.to_csv(index=False, lineterminator="\n")
    # Through records: joining frames whose columns are empty on one side is deprecated in pandas.
    records = measured.to_dict("records") + [{"kind": "published", **row} for row in published_rows]
    table = pd.DataFrame(records, columns=[*measured.columns, "source"])
    # Counts stay whole numbers beside rows that have none.
    table = table.astype(dict.fromkeys(("runs", "questions", "left_out"), "Int64"))
    return table.to_csv(index=False, lineterminator="\n")


def _answer_paths(names: Sequence[str], base: str | None) -> list[Path]:
    """The files named, those in the folders named, and the baseline's; each once, sorted."""
    found: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"no answer files (*.jsonl) in the folder {path}")
        found |= {file.resolve(): file for file in files}
    if base is not None and Path(base).is_file():
        found.setdefault(Path(base).resolve(), Path(base))
    return [found[key] for key in sorted(found)]


def _refuse_inputs(outputs: Sequence[str | None], inputs: Sequence[Path]) -> None:
    read = {path.resolve() for path in inputs}
    for output in filter(None, outputs):
        if Path(output).resolve() in read:
            raise UserError(f"{output} is one of the answer files; give another file to write to")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m evaluation.leaderboard",
        description="Merge answer files into one Spec-Bench-shaped table of speed-ups.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "paths", nargs="+", metavar="FILE_OR_DIR", help="answer files, or folders of *.jsonl"
    )
    parser.add_argument(
        "--base",
        metavar="METHOD_OR_FILE",
        help="the baseline: a method's name, or one of its answer files (default: vanilla)",
    )
    parser.add_argument(
        "--published",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show published figures below (default: yes)",
    )
    parser.add_argument(
        "--published-device",
        nargs="+",
        default=list(DEFAULT_DEVICES),
        metavar="DEVICE",
        help="published figures of these devices, or the beginnings of their names (default: A100)",
    )
    parser.add_argument(
        "--published-model",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="published figures of these models, or the beginnings of their names (default: all)",
    )
    parser.add_argument("--markdown", metavar="OUT.md", help="write the tables to this file too")
    parser.add_argument("--csv", metavar="OUT.csv", help="write one line a row, all digits")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_command(main)
