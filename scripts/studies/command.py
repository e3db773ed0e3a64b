r"""Studies of drafting: one question each, answered by a table and a figure.

Questions are answered once and recorded; every drafter of a study is then run through the one loop
on the recording, which asks the model only about texts that nobody asked about before. Acceptance
does not depend on the clock, so that a busy machine gives the same figures.

Examples:
    python -m scripts.studies budget --num-questions 8
    python -m scripts.studies field --mix spec_bench=60 mbpp=20 spec_bench:math_reasoning=20
    python -m scripts.studies all --recording demo.replay --out studies
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from evaluation.answering.config import AnswerOptions
from evaluation.answers.provenance import git_commit
from evaluation.questions.conversation import choose_conversation
from evaluation.reporting.chart_style import COLORS, MARKERS, STYLE, WIDTH, svg_text
from evaluation.reporting.options import make_folder
from evaluation.reporting.tables import cell, json_line, markdown_table
from model.commands.command_line import OptionParser, UserError
from model.commands.files import write_whole
from model.commands.loading import load_config_and_tokenizer
from model.options import unknown_name
from scripts.replay.command import TOP_K, add_model_options, load_recorded_model, record
from scripts.replay.mix import asked_questions
from scripts.replay.recording import Recording
from scripts.studies.catalogue import CHECKS, NUM_READ, STUDIES
from scripts.studies.lab import Lab, Study

ALL = "all"
# More series than these have their legend below the picture.
MOST_INSIDE = 8


def chart(study: Study) -> Figure:
    """Draw a study: lines where a number is varied, bars where names are."""
    series = list(dict.fromkeys(point.series for point in study.points))
    places = list(dict.fromkeys(point.x for point in study.points))
    is_line = all(isinstance(place, int | float) for place in places)
    with matplotlib.rc_context(STYLE):
        is_crowded = len(series) > MOST_INSIDE
        figure = Figure(figsize=(WIDTH, 3.6 + 0.11 * len(series) * is_crowded))
        axes = figure.add_subplot()
        for index, name in enumerate(series):
            points = [point for point in study.points if point.series == name]
            values = [point.figures.mat for point in points]
            color = COLORS[index % len(COLORS)]
            if is_line:
                xs = [float(point.x) for point in points]
                marker, line = MARKERS[index % len(MARKERS)], "-" if index < len(COLORS) else "--"
                axes.plot(xs, values, marker=marker, linestyle=line, color=color, label=name)
            else:
                width = 0.8 / len(series)
                shift = (index - (len(series) - 1) / 2) * width
                spots = [places.index(point.x) + shift for point in points]
                axes.bar(spots, values, width * 0.92, color=color, label=name)
        if is_line:
            _scale(figure, [float(place) for place in places])
        else:
            axes.set_xticks(range(len(places)), [str(place).replace(" ", "\n") for place in places])
        axes.set_xlabel(study.varied)
        axes.set_ylabel("mean accepted tokens a step")
        axes.set_ylim(bottom=1)
        if is_crowded:
            figure.legend(loc="outside lower center", ncols=2, fontsize=8)
        else:
            axes.legend(fontsize=8)
    return figure


def _scale(figure: Figure, places: list[float]) -> None:
    """Put marks at the values; on a logarithm where they span a decade, or double."""
    (axes,) = figure.axes
    is_doubling = len(places) > 2 and all(2 * left == right for left, right in pairwise(places))
    if min(places) >= 1 and (is_doubling or max(places) / min(places) >= 10):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
    if len(places) <= 8:
        axes.set_xticks(places)


def page(name: str, study: Study, title: str, num_turns: int) -> str:
    """Return a study as Markdown: question, provenance, table, figure."""
    header = ["drafter", study.varied, "MAT", "MAT before loops", "nodes a step"]
    rows = [[point.series, str(point.x), *map(cell, point.figures)] for point in study.points]
    greedy = ", greedy" if study.is_greedy else ""
    parts = [
        f"# {study.question}",
        f"`python -m scripts.studies {name}`, commit {git_commit() or 'unknown'}: {num_turns} turns of "
        f"{title}{greedy}. MAT is the mean of accepted tokens a step, bonus token included; before loops: only "
        "steps that begin before an answer is seen to repeat itself. Nodes include the root.",
        study.note,
        markdown_table(header, rows, num_text_columns=2),
        *(f"{table.caption}:\n\n{table.markdown}" for table in study.tables),
        f"![{study.question}]({name}.svg)",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = OptionParser(prog="python -m scripts.studies", description=__doc__)
    parser.add_argument("studies", nargs="+", help=f"of: {', '.join(STUDIES)}; or {ALL}")
    parser.add_argument("--out", default="studies", help="folder to write to (%(default)s)")
    parser.add_argument(
        "--recording",
        help="file of scripts.replay record to go on with; what is asked for is added to it",
    )
    parser.add_argument(
        "--files",
        nargs="+",
        metavar="NAME=FILE",
        help="files that lines of the study field need, such as automaton=corpus.safetensors",
    )
    add_model_options(parser, None, f"{TOP_K}, or as many more as the studies read")
    return parser


def _files_of(given: Sequence[str] | None, names: Sequence[str]) -> dict[str, str]:
    """Return the files by name, and check them where a study takes some.

    Raises:
        UserError: if a file is not given as NAME=FILE, has no use or is not there.
    """
    files = {}
    for words in given or ():
        name, found, file = words.partition("=")
        if not (name and found and file):
            raise UserError(f"files: got {words!r}; allowed: NAME=FILE")
        files[name] = file
    checks = [CHECKS[name] for name in names if name in CHECKS]
    if files and not checks:
        raise UserError(f"files: got {' '.join(files)}; only these take any: {', '.join(CHECKS)}")
    for check in checks:
        check(files)
    return files


def check_num_questions(number: int) -> None:
    """Refuse a single question: templates are learned on every other one, and scored on the rest.

    Raises:
        UserError: naming the option.
    """
    if number < 2:
        raise UserError(
            f"num_questions: got {number}; allowed: 2 or more, since templates are learned on every "
            "other question and scored on the rest"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run studies."""
    args = build_parser().parse_args(argv)
    for name in args.studies:
        if name not in (*STUDIES, ALL):
            raise UserError(unknown_name("studies", name, [*STUDIES, ALL]))
    names = list(STUDIES) if ALL in args.studies else args.studies
    files = _files_of(args.files, names)
    out = Path(args.out)
    file = Path(args.recording) if args.recording else None
    if file:
        defaults = vars(build_parser().parse_args([ALL]))
        for name, value in vars(args).items():
            if name not in ("studies", "out", "recording", "files") and value != defaults[name]:
                raise UserError(
                    f"{name}: got {value} with a recording, which has its own; leave it out"
                )
        recording = Recording.load(file)
    if args.top_k is None:
        args.top_k = max(TOP_K, *(NUM_READ.get(name, 8) for name in names))
    top_k = recording.source.top_k if file else args.top_k
    for name in names:
        if top_k < NUM_READ.get(name, 8):
            raise UserError(
                f"top_k: got {top_k}; allowed: {NUM_READ.get(name, 8)} or more, which the study {name} reads"
            )
    check_num_questions(recording.num_questions if file else len(asked_questions(args)))
    make_folder(out)
    if file:
        model = load_recorded_model(recording.source)
    else:
        recording, model = record(args)
    _, tokenizer = load_config_and_tokenizer(recording.source.model_path)
    template = AnswerOptions().conv_template
    conversation = choose_conversation(template, recording.source.model_path, tokenizer)
    with TemporaryDirectory() as folder:
        lab = Lab(recording, model, conversation, Path(folder), files)
        if file:
            lab.save = partial(recording.save, file)
        for name in names:
            study = STUDIES[name](lab)
            text = page(name, study, recording.source.title, len(recording.turns))
            write_whole(out / f"{name}.svg", svg_text(chart(study), name))
            write_whole(out / f"{name}.md", text)
            print(text)
            points = [
                {**point._asdict(), "figures": point.figures._asdict()} for point in study.points
            ]
            tables = {table.caption: table.records for table in study.tables}
            print(json_line({"study": name, "points": points, "tables": tables}))
            lab.save()
    return 0
