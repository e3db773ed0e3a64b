r"""What a method's memory had seen decides how much it accepts: compare its states on equal questions.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from tqdm import tqdm

from evaluation.answering import command as cli
from evaluation.answering.config import QuestionOptions, RunConfig
from evaluation.answering.method import MethodAnswerer, Setup, load_answerer
from evaluation.answering.run import check_run_model
from evaluation.answers.rows import Row
from evaluation.questions.conversation import choose_conversation
from evaluation.questions.questions import Question, load_questions, question_file_of
from evaluation.reporting.tables import cell, json_line, markdown_table, task_title
from evaluation.scoring.figures import OVERALL, in_task_order
from evaluation.scoring.intervals import Interval, paired_interval, ratio_of_rates
from evaluation.scoring.per_question import question_frame
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.matrix_file import make_drafter, read_memory
from model.methods.registry import METHODS, drafter_class

# Options of an inference command that mean nothing where no answer file is written.
REFUSED = (
    *("model_id", "answer_file", "resume", "overwrite", "warmup", "shard", "shuffle"),
    *("num_workers", "num_gpus_total", "ray_address"),
)
HOT = "hot"
EXAMPLES = """\
examples:
  python -m evaluation.compare_states --method recycling --max-new-tokens 128
  python -m evaluation.compare_states --method recycling --shuffles 1 2 3 \\
      --bench-name spec_bench --load-matrix matrix.safetensors

Further options are those of the method's inference command, but for answer files and workers.
"""


@dataclass(frozen=True, slots=True)
class State:
    """How a pass over the questions goes.

    Attributes:
        name: its name in the table.
        questions: in the order asked.
        resets: before which of them, by id, the memory is emptied.
        is_warm: whether the first question begins with a memory.
    """

    name: str
    questions: Sequence[Question]
    resets: frozenset[int | str] = frozenset()
    is_warm: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and one line of JSON; return 1 if a question failed.

    Args:
        argv: The command line's words; None takes the process's own.

    Raises:
        UserError: Something given cannot be used, or the method keeps no memory.
    """
    options, rest = _parse(argv)
    run, config, matrix = cli.parse(options.method, rest)
    _check(options.shuffles, run, config, matrix)
    file = question_file_of(run.questions.bench_name, run.questions.question_file)
    questions = load_questions(file, run.questions.question_begin, run.questions.question_end)
    answerer, setup = _load(options.method, run, config, matrix.load)
    rows = {}
    for state in states_of(questions, options.shuffles):
        rows[state.name] = list(_answer(answerer, setup, state))
        if not setup.start_memory:
            memory = answerer.drafter.memory()
            setup.start_memory = {name: tensor.clone() for name, tensor in memory.items()}
    figures = state_figures(rows)
    print(_table(figures))
    num_failed = sum("error" in row for answered in rows.values() for row in answered)
    if num_failed:
        print(f"{num_failed} answers failed", file=sys.stderr)
    print(json_line({"method": options.method, "failed": num_failed, "states": figures}))
    return 1 if num_failed else 0


def state_figures(rows: dict[str, list[Row]]) -> list[dict[str, Any]]:
    """Return mean accepted tokens by task and state, and each state against hot.

    Args:
        rows: answers by state, to the same questions; `HOT` among them.

    Returns:
        For every state: ``state``, ``tasks`` (mean accepted tokens), ``ratio`` of the overall one to
        hot's, its ``interval``, and whether that ``is_different`` from 1.
    """
    frames = {name: question_frame(answered) for name, answered in rows.items()}
    sound = set.intersection(
        *(set(frame.loc[frame["is_sound"], "question_id"]) for frame in frames.values())
    )
    parts = {
        name: frame[frame["question_id"].isin(sound)].set_index("question_id").sort_index()
        for name, frame in frames.items()
    }
    return [
        {"state": name, "tasks": _tasks(part), **_against(part, parts[HOT])}
        for name, part in parts.items()
    ]


def _tasks(frame: pd.DataFrame) -> dict[str, float]:
    sums = frame.groupby("task")[["accepted", "steps"]].sum()
    sums.loc[OVERALL] = sums.sum()
    ratios = sums["accepted"] / sums["steps"]
    return {str(task): float(ratios[task]) for task in in_task_order(sums.index)}


def _against(frame: pd.DataFrame, hot: pd.DataFrame) -> dict[str, Any]:
    sides = [part[name].to_numpy() for part in (frame, hot) for name in ("accepted", "steps")]
    samples = (sides[0], sides[1], sides[2], sides[3])
    interval: Interval = paired_interval(ratio_of_rates, samples)
    return {
        "ratio": float(ratio_of_rates(*samples)),
        "interval": interval,
        "is_different": interval.excludes_one,
    }


def states_of(questions: Sequence[Question], seeds: Sequence[int]) -> list[State]:
    """Return the states, hot first: a warm one may begin with what it left."""
    by_category = sorted(questions, key=lambda question: question.category)
    firsts: dict[str, int | str] = {}
    for question in by_category:
        firsts.setdefault(question.category, question.question_id)
    return [
        State(HOT, questions),
        *(
            State(f"{HOT}, shuffle {seed}", QuestionOptions(shuffle=seed).in_order(questions))
            for seed in seeds
        ),
        State("per category", by_category, frozenset(firsts.values())),
        State("cold", questions, frozenset(question.question_id for question in questions)),
        State("warm", questions, is_warm=True),
    ]


def _answer(answerer: MethodAnswerer, setup: Setup, state: State) -> Iterator[Row]:
    answerer.drafter.reset()
    if state.is_warm:
        answerer.drafter.load_memory(setup.start_memory)
    for question in tqdm(state.questions, desc=state.name, unit="question"):
        if question.question_id in state.resets:
            answerer.drafter.reset()
        yield setup.ask(answerer, question)


def _load(
    method: str, run: RunConfig, config: Any, matrix: str | None
) -> tuple[MethodAnswerer, Setup]:
    """Load what answers questions; everything that can be wrong is found before the weights load."""
    model = check_run_model(run)
    setup = Setup(
        method=method,
        run=run,
        config=config,
        model=model,
        conversation=choose_conversation(
            run.answers.conv_template, run.model.model_path, model.tokenizer
        ),
        start_memory=read_memory(matrix),
        model_id=method,
    )
    if model.vocab_size:  # a matrix that does not fit is found before the weights load
        make_drafter(method, config, model.vocab_size, model.device, setup.start_memory)
    return load_answerer(setup), setup


def _table(figures: Sequence[dict[str, Any]]) -> str:
    tasks = list(figures[0]["tasks"])
    rows = []
    for line in figures:
        low, high = line["interval"]
        interval = "-" if math.isnan(low) else f"[{low:.3f}, {high:.3f}]"
        verdict = "" if line["is_different"] or line["state"] == HOT else " not different"
        ratio = f"{line['ratio']:.3f}"
        rows.append(
            [
                line["state"],
                *(cell(line["tasks"][task]) for task in tasks),
                ratio,
                interval + verdict,
            ]
        )
    return markdown_table(["MAT, memory", *map(task_title, tasks), "/ hot", "95%"], rows)


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = OptionParser(
        prog="python -m evaluation.compare_states",
        description="Mean accepted tokens of a method with its memory in several states.",
        epilog=EXAMPLES,
    )
    keeping = [method for method in METHODS if drafter_class(method).keeps_memory()]
    parser.add_argument("--method", required=True, choices=keeping, help="keeps a memory")
    parser.add_argument(
        "--shuffles",
        type=int,
        nargs="*",
        default=[0],
        metavar="SEED",
        help="orders of the questions beside the file's (default: 0)",
    )
    return parser.parse_known_args(argv)


def _check(
    shuffles: Sequence[int], run: RunConfig, config: Any, matrix: argparse.Namespace
) -> None:
    """Refuse what this command does not do, rather than ignore it."""
    given, defaults = run.options(), RunConfig().options()
    for name in REFUSED:
        if given[name] != defaults[name]:
            raise UserError(
                f"{name}: got with compare_states, which has no use for it; leave it out"
            )
    if matrix.save:
        raise UserError("save_matrix: got with compare_states, which saves nothing; leave it out")
    if getattr(config, "start", None) not in (None, HOT):
        raise UserError(
            f"start: got {config.start}; leave it out: this command compares the starts"
        )
    for name in ("budget", "tree_version"):
        if getattr(config, name, None) == "auto":
            raise UserError(
                f"{name}: got auto, which follows the clock, so that no two runs are alike; allowed: "
                f"{'fixed' if name == 'budget' else 'a tree template'}"
            )
    if len(set(shuffles)) < len(shuffles) or min(shuffles, default=0) < 0:
        raise UserError(f"shuffles: got {shuffles}; allowed: different seeds of 0 or more")


if __name__ == "__main__":
    run_command(main)
