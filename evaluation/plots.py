"""Pictures of answer files and of a device's step costs, as PNG and SVG.

For each group of comparable answers (``groups.py``): speed-up per task with intervals, how many
tokens a step brings, which nodes of the draft tree are accepted, and how acceptance grows with the
questions seen. For each report of ``scripts.benchmark``: what a step over N nodes costs, which is the
acceptance at which it breaks even. The leaderboard's page shows the same pictures.

Run:
    python -m evaluation.plots data/demo/model_answer --out plots
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from evaluation.answers.step_figures import node_counts
from evaluation.reporting import chart_style, charts
from evaluation.reporting.benchmark_reports import Benchmark, read_benchmark
from evaluation.reporting.options import (
    add_base_option,
    add_benchmark_option,
    answer_paths,
    make_folder,
)
from evaluation.reporting.tree_chart import tree_chart
from evaluation.scoring.comparable import AnswerFile, Group, group_answers, load_answers
from evaluation.scoring.figures import CODE
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import replace_file, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = """\
examples:
  python -m evaluation.plots data/demo/model_answer --out plots
  python -m evaluation.plots vanilla.jsonl hot.jsonl cold.jsonl --out plots
  python -m evaluation.plots --benchmark docs/benchmarks/cpu-demo-float32.json --out plots
"""


class Picture(NamedTuple):
    """A drawn figure.

    Attributes:
        name: What its files are called; differs from the names of the others beside it.
        title: One line.
        caption: How to read it.
        figure: The drawing.
    """

    name: str
    title: str
    caption: str
    figure: Figure


def main(argv: Sequence[str] | None = None) -> int:
    """Write every picture and name the files on stdout; return the exit code.

    Args:
        argv: The command line's words; None takes the process's own.

    Raises:
        UserError: An input is not what it should be, or a file cannot be written.
    """
    options = _parse(argv)
    if not options.paths and not options.benchmark:
        raise UserError("nothing to draw; give answer files, or a report with --benchmark")
    if options.base and not options.paths:
        raise UserError("base: got without answer files; give some, or leave it out")
    paths = answer_paths(options.paths, options.base)
    groups = group_answers([load_answers(path) for path in paths], options.base)
    reports = [read_benchmark(path) for path in options.benchmark]
    pictures = [*chain.from_iterable(group_pictures(groups)), *benchmark_pictures(reports)]
    for picture in pictures:
        for file in write_picture(picture, Path(options.out)):
            print(file)
    return 0


def group_pictures(groups: Sequence[Group]) -> list[list[Picture]]:
    """Draw every group; with several groups a picture's name says which one it is of."""
    prefixes = [
        f"group-{number}-" if len(groups) > 1 else "" for number in range(1, len(groups) + 1)
    ]
    return [
        [picture._replace(name=prefix + picture.name) for picture in _pictures_of(group)]
        for prefix, group in zip(prefixes, groups, strict=True)
    ]


def benchmark_pictures(reports: Sequence[Benchmark]) -> list[Picture]:
    """Draw the step costs of every benchmark report."""
    return [
        Picture(
            "step-cost" + (f"-{number}" if len(reports) > 1 else ""),
            f"What a step costs: {report.conditions}",
            "Time of one forward pass over a draft tree, relative to a pass over one node. A method "
            "gains where the tokens that its steps bring (MAT) lie above the line at its number of "
            "nodes, drafting itself left aside.",
            charts.step_cost_chart(report.costs, report.accepted, report.nodes),
        )
        for number, report in enumerate(reports, start=1)
    ]


def write_picture(picture: Picture, folder: Path) -> list[Path]:
    """Write a picture as PNG and SVG into a folder, made if missing; return the files.

    Raises:
        UserError: A file cannot be written.
    """
    make_folder(folder)
    files = [folder / f"{picture.name}.{ending}" for ending in ("png", "svg")]
    replace_file(files[0], lambda file: file.write_bytes(chart_style.png_bytes(picture.figure)))
    write_whole(files[1], chart_style.svg_text(picture.figure, picture.name) + "\n")
    return files


def _pictures_of(group: Group) -> Iterator[Picture]:
    baseline = group.baseline.label
    look = chart_style.looks([row.entry.label for row in group.rows])
    speedups = _speedups(group)
    if (speedups["method"] != baseline).any():
        yield Picture(
            "speedup",
            "Speed-up by task",
            f"Tokens per second relative to {baseline}; bars are paired 95% intervals over questions.",
            charts.speedup_chart(speedups, baseline, look),
        )
    # MBPP beside Spec-Bench has no part in overall figures.
    files = {row.entry.label: row.entry.runs.get(group.conditions[-1], []) for row in group.rows}
    lengths = {
        label: [length for file in runs for length in _accept_lengths(file)]
        for label, runs in files.items()
    }
    drafting = [row.entry for row in group.rows if max(lengths[row.entry.label], default=1) > 1]
    if not drafting:
        return
    yield Picture(
        "accept-lengths",
        "How many tokens a step brings",
        "Share of a method's steps by the number of tokens they emit; one is what plain decoding "
        "does. A method that only sometimes guesses has most steps at one.",
        charts.accept_length_chart({entry.label: lengths[entry.label] for entry in drafting}, look),
    )
    for place, entry in enumerate(drafting, start=1):
        nodes = node_counts([row for file in entry.files for row in file.rows])
        if not nodes.empty:
            yield Picture(
                f"tree-{place}",
                f"Which guesses are accepted: {entry.label}",
                "Share of the steps with a draft that accept a guess of this depth and of this rank "
                "among its siblings; a depth's shares sum to the share of steps that get so far. A "
                "larger circle stands for more guesses a step.",
                tree_chart(nodes),
            )
    yield Picture(
        "warm-up",
        "Acceptance against questions seen",
        "Mean accepted tokens over all steps up to a question, in the order of answering. Dashed "
        "methods forget between questions.",
        charts.warm_up_chart(
            {entry.label: _mat_so_far(files[entry.label]) for entry in drafting},
            [entry.label for entry in drafting if entry.options.get("start") == "cold"],
            _task_order([file for entry in drafting for file in files[entry.label]]),
            look,
        ),
    )


def _speedups(group: Group) -> pd.DataFrame:
    """Columns method, task, speedup, low, high: tasks in order, of each the best method first."""
    lines = [
        (
            row.entry.label,
            task,
            row.figures.figure(task, "speedup"),
            *row.figures.interval(task, "speedup"),
        )
        for task in group.tasks
        for row in group.rows
    ]
    frame = pd.DataFrame(lines, columns=["method", "task", "speedup", "low", "high"])
    return frame.dropna(subset="speedup")


def _accept_lengths(file: AnswerFile) -> list[int]:
    """Tokens of every step that overall figures are over, of the rows without a defect."""
    is_sound = file.frame["is_sound"]
    rows = [row for row, sound in zip(file.rows, is_sound, strict=True) if sound]
    counted = [row for row in rows if row["category"] != CODE] or rows
    choices = [choice for row in counted for choice in row["choices"]]
    # Other writers may count steps that bring nothing.
    return [int(it) for choice in choices for it in choice["accept_lengths"] if it >= 1]


def _mat_so_far(files: Sequence[AnswerFile]) -> list[float]:
    """MAT of all steps up to each question, over all runs; rows with a defect bring none."""
    frames = [file.frame for file in files]
    work = [frame[["accepted", "steps"]].where(frame["is_sound"], 0) for frame in frames]
    total = pd.concat(work).groupby(level=0).sum().cumsum()
    return list(total["accepted"] / total["steps"])


def _task_order(files: Sequence[AnswerFile]) -> list[str]:
    """Task of each question in the order of answering, empty if the files differ in it."""
    orders = {tuple(file.frame["task"]) for file in files}
    return list(orders.pop()) if len(orders) == 1 else []


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m evaluation.plots",
        description="Draw answer files and benchmark reports, as PNG and SVG.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "paths", nargs="*", metavar="FILE_OR_DIR", help="answer files, or folders of *.jsonl"
    )
    add_benchmark_option(parser)
    add_base_option(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the pictures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_command(main)
