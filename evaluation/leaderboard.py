"""Merge answer files into one Spec-Bench-shaped leaderboard, with published figures set apart.

Files are grouped by what must be equal for a speed-up to mean anything: model, device, dtype,
threads, token limit and temperature, as their sidecars say. In a group, every method is compared
with the group's own baseline, by both rulers (`scoring/figures.py`). Files of the same method with
the same options are runs of it: run i is compared with run i of the baseline (from the first again
if the baseline has fewer), and mean ± deviation are shown. MBPP's answers fill the code column of
the Spec-Bench answers beside them; overall figures stay over Spec-Bench's questions.

Answer files without a sidecar (Spec-Bench's own, for instance) form a group of unknown conditions,
each under its model id. A second run of vanilla made in the same interleaved run (its sidecar's role
is "noise floor") has no row: it says which ratios cannot be told apart.

A file of a folder that is empty or no answer file, and a group without a baseline, are left out with a
line in the notes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from evaluation.answers.answer_file import (
    Categories,
    add_category_options,
    add_tokenizer_option,
    load_tokenizer,
)
from evaluation.reporting.latex import latex_text
from evaluation.reporting.leaderboard_tables import (
    OVERVIEW_FACTS,
    batch_tables,
    csv_text,
    group_tables,
    measured_rows,
    overview_table,
    pairs_table,
    questions_csv,
    spec_bench_csv,
)
from evaluation.reporting.notes import alarms, group_caption, group_notes
from evaluation.reporting.published import (
    DEFAULT_DEVICES,
    PUBLISHED_DIR,
    baseline_of,
    published_rows,
    published_tables,
    read_published,
)
from evaluation.reporting.tables import Section, Table, json_line
from evaluation.reporting.titles import group_facts
from evaluation.scoring.comparable import group_answers, load_all
from evaluation.scoring.groups import Group
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import refuse_outputs, write_whole

PUBLISHED_HEADING = "Published figures (other people's measurements, not ours)"
INTRODUCTION = (
    "Speed-ups are ratios of tokens per second to plain decoding of the same model under the same "
    "conditions, prompt included; mean accepted tokens are tokens per step of decoding. What was "
    "measured here comes first, with its device and commit; figures that others published come last. "
    "Click a column's title to sort."
)
# The files of --out; each has an option of its own.
FILES = {
    "markdown": ("leaderboard.md", "write the tables to this file too"),
    "latex": ("leaderboard.tex", "write the tables for a paper; they need the package booktabs"),
    "csv": ("leaderboard.csv", "write one line a row, all digits, with conditions and intervals"),
    "questions_csv": (
        "questions.csv",
        "write one line a question, method and run: tokens, steps and seconds, the baseline's beside them",
    ),
    "spec_bench_csv": ("spec-bench.csv", "write only the columns of Spec-Bench's leaderboard"),
    "json": ("leaderboard.json", "write all figures to this file; - prints them as one line"),
    "html": ("leaderboard.html", "write a page with tables and pictures"),
}
STDOUT = "-"
EXAMPLES = """\
examples:
  python -m evaluation.leaderboard data/demo/model_answer
  python -m evaluation.leaderboard run_1 run_2 run_3 --markdown table.md --html table.html
  python -m evaluation.leaderboard data/demo/model_answer --out report --pictures plots
  python -m evaluation.leaderboard pld.jsonl plain.jsonl --base plain.jsonl --json - | tail -n 1
  python -m evaluation.leaderboard answers --published-device A100-80GB 3090

exit code: 0 a report, with what was left out in its notes; 2 nothing to report, or a named file that
cannot be read
"""


class Leaderboard(NamedTuple):
    """Everything that the leaderboard shows."""

    groups: list[Group]
    parts: list[Section]  # of each group
    batch_tables: list[Table]  # one for each set of groups that differ in nothing else
    published_tables: list[Table]  # one for each source and device
    records: dict[str, Any]  # of the line of JSON
    left_out: Sequence[str]  # why a file, a method or a group is not there, a line each


def leaderboard_of(
    groups: list[Group], published: pd.DataFrame | None = None, left_out: Sequence[str] = ()
) -> Leaderboard:
    """Return the tables of groups, and of published figures if there are some."""
    parts: list[Section] = []
    measured: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    for group, facts in zip(groups, group_facts(groups), strict=True):
        baseline = baseline_of(group, published)
        table = pairs_table(group)
        heading = "; ".join(facts[name] for name in OVERVIEW_FACTS if name in facts)
        notes = group_notes(group, baseline)
        parts.append(Section(f"Measured: {heading}", facts, group_tables(group, table), notes))
        measured += measured_rows(group, baseline)
        pairs += table.records
    records = {
        "alarms": alarms(groups),
        "measured": measured,
        "pairs": pairs,
        "notes": [note for part in parts for note in part.notes],
        "left_out": left_out,
        "published": [] if published is None else published_rows(published, groups),
    }
    shown = [] if published is None else list(published_tables(published, groups))
    return Leaderboard(groups, parts, batch_tables(groups), shown, records, left_out)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, write what is asked for; return the exit code."""
    options = _parse(argv)
    paths = _answer_paths(options.paths, options.base)
    outputs = _output_files(options)
    refuse_outputs(outputs.values(), paths)
    published = None
    if options.published:
        devices = options.published_device or DEFAULT_DEVICES
        published = read_published(PUBLISHED_DIR, devices, options.published_model or ())
    left_out: list[str] = []
    categories = Categories(options.question_file, options.category_map)
    tokenizer = load_tokenizer(options.tokenizer_path)
    files = load_all(paths, options.paths, left_out, categories, tokenizer)
    groups = group_answers(files, options.base, left_out)
    board = leaderboard_of(groups, published, left_out)
    json_text = json_line(board.records) + "\n"
    writers: dict[str, Callable[[], str]] = {
        "markdown": lambda: text_of(board) + "\n",
        "latex": lambda: _latex(board, paths),
        "csv": lambda: csv_text(board.records["measured"], board.records["published"], left_out),
        "questions_csv": lambda: questions_csv(groups),
        "json": lambda: json_text,
        "html": lambda: _html(board),
        "spec_bench_csv": lambda: spec_bench_csv(groups),
    }
    contents: dict[Path, str | bytes] = {path: writers[name]() for name, path in outputs.items()}
    if options.pictures:
        contents |= _pictures(groups, Path(options.pictures))
    for folder in filter(None, (options.out, options.pictures)):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {folder}: {error.strerror}") from None
    # Before anything is printed: a reader such as head may close the pipe.
    written, failures = [], []
    for path, content in contents.items():
        try:
            write_whole(path, content)
            written.append(path)
        except UserError as error:  # the tables are still to be shown
            failures.append(error)
    warnings = [f"left out: {reason}" for reason in left_out]
    for warning in [*warnings, *(text for group in groups for text in group.warnings)]:
        print(f"WARNING: {warning}", file=sys.stderr)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    print(text_of(board))
    if options.json == STDOUT:
        print(json_text, end="")
    for failure in failures:
        raise failure
    return 0


def text_of(board: Leaderboard) -> str:
    """Return the tables of all groups, each with caption and notes, and below them the published ones."""
    parts = [f"**{alarm}**" for alarm in board.records["alarms"]]
    for part in board.parts:
        parts.append(group_caption(part.facts))
        for table in part.tables:
            parts += [table.caption, table.markdown]
        parts.append("\n".join(f"- {note}" for note in part.notes))
    for table in board.batch_tables:
        parts += [table.caption, table.markdown]
    parts.append("\n".join(f"- Left out: {reason}" for reason in board.left_out))
    if board.published_tables:
        parts.append(f"## {PUBLISHED_HEADING}")
    for table in board.published_tables:
        parts += [table.caption, table.markdown, *table.notes]
    return "\n\n".join(filter(None, parts))


def _latex(board: Leaderboard, paths: Sequence[Path]) -> str:
    """Return the tables as floats; a group's conditions are in its captions, its notes below its first."""
    tables = [
        table._replace(
            caption=f"{table.caption}. {group_caption(part.facts)}",
            notes=[] if place else part.notes,
        )
        for part in board.parts
        for place, table in enumerate(part.tables)
    ]
    above = [*board.records["alarms"], *(f"Left out: {reason}" for reason in board.left_out)]
    tables[0] = tables[0]._replace(notes=[*above, *tables[0].notes])
    # A paper names files, not the folders of one machine; the longest first, since one may hold another.
    folders = sorted({f"{path.parent}/" for path in paths}, key=len, reverse=True)
    for place, table in enumerate(tables):
        notes = "\n".join(table.notes)
        for folder in folders:
            notes = notes.replace(folder, "")
        tables[place] = table._replace(notes=notes.splitlines())
    return latex_text([*tables, *board.batch_tables, *board.published_tables])


def _html(board: Leaderboard) -> str:
    # Imported late: matplotlib takes a while.
    from evaluation.reporting.html_page import page_text
    from evaluation.reporting.pictures import group_pictures

    sections = []
    if len(board.groups) > 1:
        sections.append(Section("All measured methods", tables=[overview_table(board.groups)]))
    for part, pictures in zip(board.parts, group_pictures(board.groups), strict=True):
        sections.append(part._replace(pictures=pictures))
    if board.batch_tables:
        sections.append(Section("By batch size", tables=board.batch_tables))
    if board.left_out:
        sections.append(Section("Left out", notes=board.left_out))
    if board.published_tables:
        sections.append(Section(PUBLISHED_HEADING, tables=board.published_tables))
    title, alarmed = "Speculative decoding leaderboard", board.records["alarms"]
    return page_text(title, INTRODUCTION, sections, alarmed)


def _pictures(groups: Sequence[Group], folder: Path) -> dict[Path, str | bytes]:
    """Return the files of every group's pictures, as PNG and SVG."""
    from evaluation.reporting.charts import png_bytes, svg_text  # imported late, too
    from evaluation.reporting.pictures import group_pictures

    files: dict[Path, str | bytes] = {}
    for picture in chain.from_iterable(group_pictures(groups)):
        files[folder / f"{picture.name}.png"] = png_bytes(picture.figure)
        files[folder / f"{picture.name}.svg"] = svg_text(picture.figure, picture.name) + "\n"
    return files


def _answer_paths(names: Sequence[str], base: str | None) -> list[Path]:
    """Return the files named, those in the folders named, and the baseline's if it is one; each once, sorted."""
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


def _output_files(options: argparse.Namespace) -> dict[str, Path]:
    files = {}
    for name, (file, _) in FILES.items():
        if (given := getattr(options, name)) and (name, given) != ("json", STDOUT):
            files[name] = Path(given)
        elif options.out:
            files[name] = Path(options.out) / file
    return files


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
    add_category_options(parser)
    add_tokenizer_option(parser)
    parser.add_argument(
        "--published",
        action=argparse.BooleanOptionalAction,
        help="show published figures below (default: no, unless some are chosen)",
    )
    parser.add_argument(
        "--published-device",
        nargs="+",
        metavar="DEVICE",
        help="published figures of these devices, or the beginnings of their names "
        f"(default: {' '.join(DEFAULT_DEVICES)})",
    )
    parser.add_argument(
        "--published-model",
        nargs="+",
        metavar="MODEL",
        help="published figures of these models, or the beginnings of their names (default: all)",
    )
    for name, (file, text) in FILES.items():
        metavar = f"OUT{Path(file).suffix}"
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write all of these into this folder, as leaderboard.md and so on",
    )
    parser.add_argument(
        "--pictures",
        metavar="DIR",
        help="draw the page's pictures into this folder, as PNG and SVG",
    )
    options = parser.parse_args(argv)
    are_chosen = bool(options.published_device or options.published_model)
    if options.published is None:
        options.published = are_chosen
    if not options.published and are_chosen:
        parser.error(
            "--published-device, --published-model: got them with --no-published; leave one out"
        )
    return options


if __name__ == "__main__":
    run_command(main)
