"""Merge answer files into one Spec-Bench-shaped leaderboard, with published figures set apart.

Files are grouped by what must be equal for a speed-up to mean anything: model, device, dtype,
threads, token limit and temperature, as their sidecars say. In a group, every method is compared
with the group's own baseline, by both rulers (``scoring/figures.py``). Files of the same method with
the same options are runs of it: run i is compared with run i of the baseline (from the first again
if the baseline has fewer), and mean ± deviation are shown. MBPP's answers fill the code column of
the Spec-Bench answers beside them; overall figures stay over Spec-Bench's questions.

Answer files without a sidecar (Spec-Bench's own, for instance) form a group of unknown conditions,
each under its model id.

Run:
    python -m evaluation.leaderboard data/demo/model_answer --out report
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from evaluation.reporting.benchmark_reports import Benchmark, read_benchmark
from evaluation.reporting.leaderboard_tables import (
    baseline_of,
    csv_text,
    exact_table,
    group_notes,
    group_table,
    measured_rows,
    overview_table,
    published_rows,
    published_tables,
    spec_bench_table,
)
from evaluation.reporting.options import (
    add_base_option,
    add_benchmark_option,
    answer_paths,
    make_folder,
)
from evaluation.reporting.published import DEFAULT_DEVICES, PUBLISHED_DIR, read_published
from evaluation.reporting.tables import Table, json_line
from evaluation.scoring.comparable import SPEC_BENCH, Group, group_answers, load_answers
from model.commands.command_line import OptionParser, run_command
from model.commands.files import refuse_outputs, write_whole

TITLE = "Speculative decoding leaderboard"
PUBLISHED_HEADING = "Published figures (other people's measurements, not ours)"
SPEC_BENCH_HEADING = "Rows for Spec-Bench's Leaderboard.md"
INTRODUCTION = (
    "Speed-ups are ratios of tokens per second to plain decoding of the same model under the same "
    "conditions, prompt included; mean accepted tokens are tokens per step of decoding. What was "
    "measured here comes first, with its device and commit; figures that others published come last. "
    "Click a column's title to sort."
)
FORMATS = ("markdown", "csv", "json", "html")
ENDINGS = {"markdown": "md"}
EXAMPLES = """\
examples:
  python -m evaluation.leaderboard data/demo/model_answer
  python -m evaluation.leaderboard run_1 run_2 run_3 --markdown table.md --html table.html
  python -m evaluation.leaderboard data/demo/model_answer \\
      --benchmark docs/benchmarks/cpu-demo-float32.json --out report
  python -m evaluation.leaderboard pld.jsonl plain.jsonl --base plain.jsonl --no-published
  python -m evaluation.leaderboard answers --published-device A100-80GB 3090
"""


class Board(NamedTuple):
    """Everything that the leaderboard shows.

    Attributes:
        groups: The measured groups.
        published: Published figures, None if they are not wanted.
        benchmarks: Reports of ``scripts.benchmark``.
    """

    groups: list[Group]
    published: pd.DataFrame | None
    benchmarks: list[Benchmark]

    @property
    def measured(self) -> list[dict[str, Any]]:
        """A record for each measured method."""
        return [
            row
            for group in self.groups
            for row in measured_rows(group, baseline_of(group, self.published))
        ]

    @property
    def published_records(self) -> list[dict[str, Any]]:
        """A record for each published row."""
        return [] if self.published is None else published_rows(self.published)

    @property
    def published_tables(self) -> list[Table]:
        """A table for each published source and device."""
        return [] if self.published is None else list(published_tables(self.published))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and one line of JSON, write what is asked for; return the exit code.

    Args:
        argv: The command line's words; None takes the process's own.

    Raises:
        UserError: An input is not what it should be, or a group has no baseline.
    """
    options = _parse(argv)
    paths = answer_paths(options.paths, options.base)
    files = _output_files(options)
    refuse_outputs(files.values(), [*paths, *options.benchmark])
    benchmarks = [read_benchmark(path) for path in options.benchmark]
    published = None
    if options.published:
        devices = options.published_device or DEFAULT_DEVICES
        published = read_published(PUBLISHED_DIR, devices, options.published_model or ())
    groups = group_answers([load_answers(path) for path in paths], options.base)
    board = Board(groups, published, benchmarks)
    writers = {"markdown": _markdown, "csv": _csv, "json": _json, "html": _html}
    contents = {name: writers[name](board) for name in files}
    if options.out:
        make_folder(options.out)
    # Before anything is printed: a reader such as head may close the pipe.
    for name, path in files.items():
        write_whole(path, contents[name])
        print(f"wrote {path}", file=sys.stderr)
    print(_text(board))
    print(_json(board), end="")
    return 0


def _text(board: Board) -> str:
    """The tables of all groups, each with caption and notes, and below them what was published."""
    parts: list[str] = []
    for group in board.groups:
        baseline = baseline_of(group, board.published)
        table = group_table(group, baseline)
        exact = exact_table(group)
        parts += [group.caption, table.markdown, exact.caption, exact.markdown]
        parts.append("\n".join(group_notes(group, baseline)))
    if board.published_tables:
        parts.append(f"## {PUBLISHED_HEADING}")
        for table in board.published_tables:
            parts += [table.caption, table.markdown]
    return "\n\n".join(filter(None, parts))


def _markdown(board: Board) -> str:
    """The printed text, and the rows to paste into Spec-Bench's leaderboard."""
    parts = [_text(board)]
    own = [group for group in board.groups if group.facts["bench"] == SPEC_BENCH]
    if own:
        parts.append(f"## {SPEC_BENCH_HEADING}")
    for group in own:
        table = spec_bench_table(group)
        parts += [table.caption, table.markdown]
    return "\n\n".join(parts) + "\n"


def _csv(board: Board) -> str:
    return csv_text(board.measured, board.published_records)


def _json(board: Board) -> str:
    report = {"measured": board.measured, "published": board.published_records}
    return json_line(report) + "\n"


def _html(board: Board) -> str:
    from evaluation.reporting.html_page import (  # imported late: matplotlib takes a while
        Section,
        page_text,
    )
    from evaluation.reporting.pictures import benchmark_pictures, group_pictures

    sections = []
    if len(board.groups) > 1:
        sections.append(Section("All measured methods", tables=[overview_table(board.groups)]))
    for group, pictures in zip(board.groups, group_pictures(board.groups), strict=True):
        baseline = baseline_of(group, board.published)
        facts = group.facts
        sections.append(
            Section(
                "Measured: "
                + ", ".join(facts[name] for name in ("model", "bench", "dtype", "device")),
                facts | {"baseline": group.baseline.label},
                [group_table(group, baseline), exact_table(group)],
                group_notes(group, baseline),
                pictures,
            )
        )
    if board.benchmarks:
        pictures = benchmark_pictures(board.benchmarks)
        sections.append(Section("What a step costs", pictures=pictures))
    if board.published is not None:
        sections.append(Section(PUBLISHED_HEADING, tables=board.published_tables))
    return page_text(TITLE, INTRODUCTION, sections)


def _output_files(options: argparse.Namespace) -> dict[str, Path]:
    """The file to write for each format wanted."""
    files = {}
    for name in FORMATS:
        if getattr(options, name):
            files[name] = Path(getattr(options, name))
        elif options.out:
            files[name] = Path(options.out) / f"leaderboard.{ENDINGS.get(name, name)}"
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
    add_base_option(parser)
    add_benchmark_option(parser)
    parser.add_argument(
        "--published",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show published figures below (default: yes)",
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
    parser.add_argument("--markdown", metavar="OUT.md", help="write the tables to this file too")
    parser.add_argument("--csv", metavar="OUT.csv", help="write one line a row, all digits")
    parser.add_argument(
        "--json", metavar="OUT.json", help="write the line of JSON to this file too"
    )
    parser.add_argument("--html", metavar="OUT.html", help="write a page with tables and pictures")
    parser.add_argument(
        "--out", metavar="DIR", help="write all four into this folder, as leaderboard.md and so on"
    )
    options = parser.parse_args(argv)
    if not options.published and (options.published_device or options.published_model):
        parser.error(
            "--published-device, --published-model: got with --no-published; leave one out"
        )
    if options.benchmark and not (options.html or options.out):
        parser.error("--benchmark draws pictures for the page; add --html or --out")
    return options


if __name__ == "__main__":
    run_command(main)
