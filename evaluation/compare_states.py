r"""Compare how much a method accepts with its memory in several states, on equal questions.

A matrix that lives across questions makes mean accepted tokens depend on the questions before. Here
one loaded model answers the same questions with the memory in several states:

- hot: empty at first, kept from question to question, in the file's order;
- hot, shuffle S: the same in another order;
- per category: emptied where a category begins, the questions sorted by category;
- cold: emptied before every question;
- warm: as the hot pass over these very questions left it, or as --load-matrix has it.

Every state but hot is compared with hot, with a paired 95% interval over questions. Tokens accepted
do not depend on the machine's speed, so that runs need not be repeated; automatic budgets, which do,
are refused.

Run:
    python -m evaluation.compare_states --method recycling --max-new-tokens 128 --shuffles 1 2
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

from evaluation.checking.memory_states import (
    HOT,
    answer_states,
    load_setup,
    state_figures,
    states_of,
)
from evaluation.inference import command as cli
from evaluation.inference.config import RunConfig
from evaluation.inference.plan import check_asked
from evaluation.reporting.tables import bounds_text, figure_text, json_line, markdown_table
from evaluation.reporting.titles import task_title
from model.commands.command_line import OptionParser, UserError, run_command, user_errors
from model.methods.registry import METHODS, drafter_class, find_method

# Options of an inference command that have no effect without an answer file.
REFUSED = (
    *("model_id", "answer_file", "resume", "overwrite", "warmup", "shard", "shuffle"),
    *("num_workers", "num_gpus_total", "ray_address", "batch_size"),
)
EXAMPLES = """\
examples:
  python -m evaluation.compare_states --method recycling --max-new-tokens 128
  python -m evaluation.compare_states --method hybrid --budget fixed --num-nodes 16
  python -m evaluation.compare_states --method recycling --shuffles 1 2 3 \\
      --bench-name spec_bench --load-matrix matrix.safetensors

All other options are those of the method's inference command, without answer files and workers.
Automatic budgets depend on the clock and are refused: hybrid needs --budget fixed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and one line of JSON; return 1 if a question failed."""
    options, rest = _parse(argv)
    with user_errors():
        method = find_method(options.method)
        if not method.drafter_class.keeps_memory():
            keeping = [name for name in METHODS if drafter_class(name).keeps_memory()]
            raise ValueError(
                f"method: got {method.name}, which keeps nothing across prompts; allowed: {', '.join(keeping)}"
            )
    run, config, matrix = cli.parse(method, rest)
    _check(options.shuffles, run, config, matrix)
    asked = check_asked(run)
    answerer, setup = load_setup(method, asked, run, config, matrix.load)
    rows = answer_states(answerer, setup, states_of(asked.questions, options.shuffles))
    figures = state_figures(rows)
    print(_table(figures))
    num_failed = sum(row.error is not None for answered in rows.values() for row in answered)
    if num_failed:
        print(f"{num_failed} answers failed", file=sys.stderr)
    print(json_line({"method": method.name, "failed": num_failed, "states": figures}))
    return 1 if num_failed else 0


def _table(figures: Sequence[dict[str, Any]]) -> str:
    tasks = list(figures[0]["tasks"])
    rows = []
    for line in figures:
        interval = "-" if math.isnan(line["interval"].low) else bounds_text(line["interval"], 3)
        verdict = "" if line["is_different"] or line["state"] == HOT else " not different"
        means = [figure_text(line["tasks"][task]) for task in tasks]
        rows.append([line["state"], *means, f"{line['ratio']:.3f}", interval + verdict])
    return markdown_table(["MAT, memory", *map(task_title, tasks), "/ hot", "95%"], rows)


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = OptionParser(
        prog="python -m evaluation.compare_states",
        description="Measure the mean accepted tokens of a method with its memory in several states.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--method", required=True, metavar="NAME", help="keeps a memory")
    parser.add_argument(
        "--shuffles",
        type=int,
        nargs="*",
        default=[0],
        metavar="SEED",
        help="seeds of further orders of the questions (default: 0)",
    )
    return parser.parse_known_args(argv)


def _check(
    shuffles: Sequence[int], run: RunConfig, config: Any, matrix: argparse.Namespace
) -> None:
    given, defaults = run.options(), RunConfig().options()
    for name in REFUSED:
        if given[name] != defaults[name]:
            raise UserError(
                f"{name}: got it with compare_states, which does not use it; leave it out"
            )
    if matrix.save:
        raise UserError(
            "save_matrix: got it with compare_states, which saves nothing; leave it out"
        )
    if getattr(config, "start", None) not in (None, HOT):
        raise UserError(
            f"start: got {config.start}; leave it out: this command compares the starts"
        )
    for name in ("budget", "tree_version"):
        if getattr(config, name, None) == "auto":
            raise UserError(
                f"{name}: got auto, which depends on measured times, so that runs differ; give "
                f"{'--budget fixed' if name == 'budget' else 'a tree template as --tree-version'}"
            )
    if len(set(shuffles)) < len(shuffles) or min(shuffles, default=0) < 0:
        raise UserError(f"shuffles: got {shuffles}; allowed: different seeds of 0 or more")


if __name__ == "__main__":
    run_command(main)
