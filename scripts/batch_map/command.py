r"""Measure where drafts are faster in batches, and draw the map: method by batch size by context.

Examples:
    python -m scripts.batch_map measure --out batches.json
    python -m scripts.batch_map measure --model-path smollm2-135m --dtype bfloat16 --out smol.json
    python -m scripts.batch_map draw batches.json smol.json --page batches-map.md --picture batches-map.svg

Exit code: 0, or 2 if an option cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from evaluation.answers.provenance import git_commit
from evaluation.questions.conversation import choose_conversation
from evaluation.questions.questions import load_questions, question_file_of
from evaluation.reporting.chart_style import svg_text
from evaluation.reporting.tables import json_line
from model.commands.command_line import OptionParser, UserError
from model.commands.files import check_output, write_whole
from model.commands.loading import check_model, load_target
from model.commands.model_options import ModelOptions
from model.commands.options import add_options, config_of
from model.engine.packing import why_not_packed
from model.machine.packages import versions
from model.machine.progress import progress
from scripts.batch_map.measure import ENTRANTS, WARM_TEXTS, Bench, Run, documentation
from scripts.batch_map.page import chart, page

MODEL_NAMES = ("model_path", "dtype", "device", "threads", "kernels", "allow_pickle")
BATCH_SIZES, CONTEXTS = (1, 2, 4, 8, 16, 32), (128, 512, 2048)
# Most cached tokens of a batch: prompts take long to read.
MOST_CACHED = 16_384


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="python -m scripts.batch_map", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure", help="measure batches of a model")
    add_options(measure, ModelOptions, MODEL_NAMES)
    numbers: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    measure.add_argument("--batch-sizes", default=BATCH_SIZES, help="texts (1 to 32)", **numbers)
    measure.add_argument("--contexts", default=CONTEXTS, help="tokens of a prompt", **numbers)
    measure.add_argument(
        "--question-file",
        type=Path,
        default=question_file_of("demo"),
        metavar="JSONL",
        help="what prompts end with, each turn by itself (%(default)s)",
    )
    measure.add_argument(
        "--steps", type=int, default=24, metavar="N", help="of each run (%(default)s)"
    )
    measure.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="repetitions (%(default)s)"
    )
    measure.add_argument(
        "--most-cached",
        type=int,
        default=MOST_CACHED,
        metavar="N",
        help="leave out batches with more prompt tokens in all (%(default)s)",
    )
    measure.add_argument("--out", required=True, metavar="JSON", help="file to write")
    draw = commands.add_parser("draw", help="write a page and a picture of measured files")
    draw.add_argument("files", nargs="+", metavar="JSON", help="files of measure")
    draw.add_argument("--page", required=True, metavar="MD", help="page to write")
    draw.add_argument("--picture", required=True, metavar="SVG", help="picture to write")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.command == "draw":
        _draw(args)
    else:
        _measure(args, list(argv) if argv is not None else sys.argv[1:])
    return 0


def _measure(args: argparse.Namespace, given: Sequence[str]) -> None:
    for name in ("batch_sizes", "contexts"):
        if min(getattr(args, name)) < 1:
            raise UserError(f"{name}: got {min(getattr(args, name))}; allowed: 1 or more")
    for name in ("steps", "rounds"):
        if getattr(args, name) < 1:
            raise UserError(f"{name}: got {getattr(args, name)}; allowed: 1 or more")
    check_output(args.out, "out")
    turns = [turn for question in load_questions(args.question_file) for turn in question.turns]
    if len(turns) < max(args.batch_sizes) + WARM_TEXTS:
        raise UserError(
            f"question_file: got {len(turns)} turns; allowed: {max(args.batch_sizes) + WARM_TEXTS} or more, for "
            f"batches of up to {max(args.batch_sizes)} texts and {WARM_TEXTS} that only fill the methods' memory"
        )
    options = config_of(
        ModelOptions, {name: getattr(args, name) for name in MODEL_NAMES if hasattr(args, name)}
    )
    checked = check_model(options)
    conversation = choose_conversation("auto", options.model_path, checked.tokenizer)
    questions = [conversation.prompt_ids([], turn) for turn in turns]
    target = load_target(options, checked)
    if reason := why_not_packed(target):
        raise UserError(
            f"model_path: got {options.model_path}, whose texts share no passes, since {reason}"
        )
    sizes = {
        context: [size for size in sorted(args.batch_sizes) if size * context <= args.most_cached]
        for context in args.contexts
    }
    bench = Bench(target, documentation(checked.tokenizer), questions, args.steps)
    num_runs = sum(map(len, sizes.values())) * len(ENTRANTS) * (args.rounds + 1)
    runs: list[Run] = []
    with progress(total=num_runs, unit="run") as bar:
        for context, batch_sizes in sizes.items():
            if batch_sizes:
                runs += bench.runs(context, batch_sizes, args.rounds, bar.update)
    facts = {
        # Folders are of no use elsewhere.
        "argv": [Path(word).name if word == args.out else word for word in given],
        "model_path": "/".join(Path(options.model_path).parts[-2:]),
        "dtype": str(checked.dtype).removeprefix("torch."),
        "device": _processor() if checked.device.type == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "steps": args.steps,
        "git_commit": git_commit(),
        "versions": versions(),
    }
    write_whole(args.out, json_line({**facts, "runs": [asdict(run) for run in runs]}) + "\n")


def _processor() -> str:
    """Return the processor's name and its instructions, as torch uses them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {torch.backends.cpu.get_cpu_capability()}"


def _draw(args: argparse.Namespace) -> None:
    found = []
    for file in args.files:
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            content["runs"] = [Run(**run) for run in content["runs"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"files: got {file}, which was not written by measure ({error})"
            ) from error
        found.append(content)
    check_output(args.page, "page")
    check_output(args.picture, "picture")
    name = Path(args.picture).stem
    write_whole(args.picture, svg_text(chart(found), name))
    write_whole(args.page, page(found, Path(args.picture).name))
