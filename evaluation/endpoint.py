"""Ask an OpenAI-compatible server a benchmark's questions, several at a time if wanted, into answer files.

One file for each number of requests at a time; tables as of any method (evaluation.speed, leaderboard). To
measure servers against each other or against a method, question by question in turn: evaluation.compare.

Run:
    python -m evaluation.endpoint --base-url http://127.0.0.1:8000 --concurrency 1 2 4 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from evaluation.answers.answer_file import read_answers
from evaluation.inference.client import EndpointConfig
from evaluation.inference.config import AnswerOptions, DecodingOptions, QuestionOptions, RunConfig
from evaluation.inference.plan import Participant, Plan, model_answers, prepare, questions_asked
from evaluation.inference.run import answer, conditions_in_names, report
from evaluation.inference.servers import Server
from evaluation.reporting.leaderboard_tables import serving_table
from model.commands.command_line import (
    OptionParser,
    UserError,
    add_options,
    config_of,
    run_command,
    user_errors,
)

ANSWERS = ("overwrite", "num_choices", "warmup", "system_prompt")
EXAMPLES = """\
examples:
  python -m evaluation.endpoint --base-url http://127.0.0.1:8000 --max-new-tokens 128
  python -m evaluation.endpoint --base-url http://127.0.0.1:8000 --concurrency 1 2 4 8 --out answers
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Ask the questions and print what clients waited; return 1 if a question failed, else 0."""
    parser = OptionParser(
        prog="python -m evaluation.endpoint",
        description="Answer questions with a server, into Spec-Bench's answer format.",
        epilog=EXAMPLES,
    )
    group = parser.add_argument_group("server")
    add_options(group, EndpointConfig)
    group.add_argument(
        "--concurrency",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="requests at a time; a file for each of several numbers (default: 1)",
    )
    group.add_argument(
        "--out", metavar="DIR", help="folder of the files (default: data/BENCH/model_answer)"
    )
    group.add_argument(
        "--model-id",
        metavar="NAME",
        help="what the names of the files begin with (default: served)",
    )
    names = [item.name for item in fields(QuestionOptions) if item.name != "prompt_tokens"]
    add_options(parser.add_argument_group("questions"), QuestionOptions, names)
    add_options(parser.add_argument_group("sampling"), DecodingOptions)
    add_options(parser.add_argument_group("answers"), AnswerOptions, ANSWERS)
    given = vars(parser.parse_args(argv))
    sizes, out = given.pop("concurrency"), given.pop("out")
    name = given.pop("model_id") or "served"
    config = config_of(EndpointConfig, given)
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise UserError(
            f"concurrency: got {' '.join(map(str, sizes))}; allowed: 1 or more, each once"
        )
    with user_errors():
        run = RunConfig.of(given)
    folder = Path(out or model_answers(run.questions))
    participant = Participant(config.base_url, Server(config.base_url), config)
    plans: dict[int, Plan] = {}
    for size in sizes:
        sized = replace(run, answers=replace(run.answers, batch_size=size))
        file = folder / f"{'-'.join([name, *conditions_in_names(sized)])}.jsonl"
        plans[size] = prepare(questions_asked(sized), participant, sized.into(file))
        answer([[plans[size]]])
    rows = {
        f"{config.base_url}, {size} at a time": read_answers(plan.log.file)
        for size, plan in plans.items()
    }
    table = serving_table(rows)
    print("\n\n".join([table.caption, table.markdown, *table.notes]))
    return report([plan.log for plan in plans.values()])


if __name__ == "__main__":
    run_command(main)
