r"""Compare all methods at equal drafted nodes: the study of the field, as a page and a figure.

Questions are answered once and recorded. Every drafter then runs through the one loop on the
recording, which asks the model only about texts that are new. Acceptance does not depend on the
clock, so a busy machine gives the same figures.

Examples:
    python -m scripts.studies field --num-questions 8
    python -m scripts.studies field --mix spec_bench=60 mbpp=20 spec_bench:math_reasoning=20
    python -m scripts.studies field --recording demo.replay --out studies
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from evaluation.answers.provenance import git_commit
from evaluation.reporting.chart_style import COLORS, MARKERS, STYLE, WIDTH, svg_text
from evaluation.reporting.options import make_folder
from evaluation.reporting.tables import figure_text, json_line, markdown_table
from model.commands.command_line import OptionParser, UserError
from model.commands.files import write_whole
from scripts.replay.command import add_model_options, load_recorded_model, record
from scripts.replay.mix import asked_questions
from scripts.replay.recording import Recording
from scripts.studies.field import check_entrants, field
from scripts.studies.lab import Lab, Study

NAME = "field"
# Tokens of a recorded row that the study reads: goose hangs 64 nodes from one row.
NUM_READ = 65
# Options that say nothing about what a recording holds.
BESIDE_RECORDING = ("study", "out", "recording", "files", "threads")


def chart(study: Study) -> Figure:
    """Draw mean accepted tokens against what is varied, a line for each series."""
    series = list(dict.fromkeys(point.series for point in study.points))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.6 + 0.11 * len(series)))
        axes = figure.add_subplot()
        for index, name in enumerate(series):
            points = [point for point in study.points if point.series == name]
            axes.plot(
                [point.x for point in points],
                [point.figures.mat for point in points],
                marker=MARKERS[index % len(MARKERS)],
                linestyle="-" if index < len(COLORS) else "--",
                color=COLORS[index % len(COLORS)],
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xticks(sorted({point.x for point in study.points}))
        axes.set_xlabel(study.varied)
        axes.set_ylabel("mean accepted tokens a step")
        axes.set_ylim(bottom=1)
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def page(name: str, study: Study, title: str, num_turns: int) -> str:
    """Return a study as Markdown: question, provenance, table, figure."""
    header = ["drafter", study.varied, "MAT", "MAT before loops", "nodes a step"]
    rows = [
        [point.series, str(point.x), *map(figure_text, point.figures)] for point in study.points
    ]
    parts = [
        f"# {study.question}",
        f"`python -m scripts.studies {name}`, commit {git_commit() or 'unknown'}: {num_turns} turns of "
        f"{title}, greedy. MAT is the mean of accepted tokens a step, bonus token included; before loops: only "
        "steps that begin before an answer is seen to repeat itself. Nodes include the root.",
        study.note,
        markdown_table(header, rows, num_text_columns=2),
        *(f"{table.caption}:\n\n{table.markdown}" for table in study.tables),
        f"![{study.question}]({name}.svg)",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="python -m scripts.studies", description=__doc__)
    parser.add_argument("study", choices=(NAME,), help="the study to run")
    parser.add_argument("--out", default="studies", help="folder to write to (%(default)s)")
    parser.add_argument(
        "--recording",
        help="file of scripts.replay record to go on with; new texts are added to it",
    )
    parser.add_argument(
        "--files",
        nargs="+",
        metavar="NAME=FILE",
        help="files that some lines need, such as automaton=corpus.safetensors",
    )
    add_model_options(parser, NUM_READ)
    return parser


def _files_of(given: Sequence[str] | None) -> dict[str, str]:
    files = {}
    for words in given or ():
        name, found, file = words.partition("=")
        if not (name and found and file):
            raise UserError(f"files: got {words!r}; allowed: NAME=FILE")
        files[name] = file
    check_entrants(files)
    return files


def _refuse_options_beside_a_recording(args: argparse.Namespace) -> None:
    defaults = vars(build_parser().parse_args([NAME]))
    for name, value in vars(args).items():
        if name not in BESIDE_RECORDING and value != defaults.get(name):
            raise UserError(
                f"{name}: got {value} with a recording, which has its own; leave it out"
            )


def _check_sizes(num_questions: int, top_k: int) -> None:
    if top_k < NUM_READ:
        raise UserError(f"top_k: got {top_k}; allowed: {NUM_READ} or more, which the study reads")
    if num_questions < 2:
        raise UserError(
            f"num_questions: got {num_questions}; allowed: 2 or more, since templates are learned on "
            "every other question and scored on the rest"
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    files = _files_of(args.files)
    out = Path(args.out)
    file = Path(args.recording) if args.recording else None
    if file:
        _refuse_options_beside_a_recording(args)
        recording = Recording.load(file)
        _check_sizes(recording.num_questions, recording.source.top_k)
        make_folder(out)
        model = load_recorded_model(recording.source, getattr(args, "threads", None))
    else:
        _check_sizes(len(asked_questions(args)), args.top_k)
        make_folder(out)
        recording, model = record(args)
    with TemporaryDirectory() as folder:
        lab = Lab(recording, model, Path(folder), files)
        if file:
            lab.save = partial(recording.save, file)
        study = field(lab)
        text = page(NAME, study, recording.source.title, len(recording.turns))
        write_whole(out / f"{NAME}.svg", svg_text(chart(study), NAME))
        write_whole(out / f"{NAME}.md", text)
        print(text)
        points = [{**point._asdict(), "figures": point.figures._asdict()} for point in study.points]
        tables = {table.caption: table.records for table in study.tables}
        print(json_line({"study": NAME, "points": points, "tables": tables}))
        lab.save()
    return 0
