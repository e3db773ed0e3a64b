"""Compare methods on one loaded model, and servers: every question is answered by each in turn.

Times are then ratios within the run, whatever the machine does meanwhile. The baseline, vanilla,
answers twice: smaller differences than between its two runs are noise. Each method writes the answer
file that its inference command would write; evaluation.leaderboard makes the tables.

Questions are shuffled, alike for every method: in the order of a file, whose tasks follow each other, a task's
figure would also be that of the memory's age. All runs keep one order: they differ by the machine alone.

Several benchmarks are answered one after the other. An OpenAI-compatible server is named by its address; of
servers alone the first is the baseline. `--batch-size` is the number of questions that each has at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.inference.command import participants_of
from evaluation.inference.config import AnswerOptions, DecodingOptions, QuestionOptions, RunConfig
from evaluation.inference.run import compare_methods
from evaluation.questions.questions import question_file_of
from model.commands.command_line import (
    OptionParser,
    UserError,
    add_options,
    config_of,
    run_command,
    user_errors,
)
from model.commands.model_options import ModelOptions
from model.options import Options, option

DEFAULT_METHODS = ("vanilla", "recycling", "recycling-auto", "pld-auto", "hybrid")
# Questions and answer files: as of an inference command, but for what is one method's own.
QUESTIONS = (
    *("question_file", "question_begin", "question_end", "num_questions", "category_map"),
    *("shard", "prompt_tokens"),
)
ANSWERS = (
    *("overwrite", "num_choices", "batch_size", "prefix_cache", "warmup", "conv_template"),
    "system_prompt",
)
EXAMPLES = """\
examples:
  python -m evaluation.compare --max-new-tokens 128
  python -m evaluation.compare --methods vanilla "recycling --tree-version 2.2.2" hybrid generate \\
      --max-new-tokens 128 --runs 3 --out answers
  python -m evaluation.compare --bench-name spec_bench mbpp --num-questions 60 --max-new-tokens 128
  python -m evaluation.compare --in-order --bench-name spec_bench --max-new-tokens 128
  python -m evaluation.compare --batch-size 8 --methods vanilla hybrid generate generate-batch \\
      --max-new-tokens 128 --out answers
  python -m evaluation.compare --methods vanilla hybrid http://127.0.0.1:8000 --max-new-tokens 128 --out answers
  python -m evaluation.compare --methods vanilla hybrid llama.cpp --model-path FILE.gguf --out answers
  python -m evaluation.compare --methods http://127.0.0.1:8000 http://127.0.0.1:8001 --out answers
  python -m evaluation.leaderboard answers
"""


@dataclass(frozen=True, slots=True)
class ComparisonOptions(Options):
    """Who is compared, how often, and where the answers go."""

    methods: tuple[str, ...] = option(
        (),
        'methods, NAME-auto (automatic number of nodes), methods with options ("pld --match latest"), '
        "package.module:DrafterClass, addresses of OpenAI-compatible servers (with --served-model, --api-key-env, "
        "--timeout), transformers' generate, generate-static, generate-pld, generate-assisted, generate-batch, "
        "and other engines: llama.cpp, llama.cpp-ngram, llama.cpp-draft, openvino, openvino-pld, ctranslate2, with "
        f"options too (default: {' '.join(DEFAULT_METHODS)})",
        metavar="METHOD",
    )
    draft_model: str | None = option(
        None,
        "the model that sps, generate-assisted and (a GGUF file) llama.cpp-draft draft with (default: the demo "
        "model's, with the demo model)",
    )
    runs: int = option(1, "repetitions of the comparison, all in one order", least=1)
    shuffle: int = option(
        0, "seed to shuffle the questions; acceptance depends on their order", least=0
    )
    in_order: bool = option(
        False, "ask the questions in their file's order: --shuffle is then left out"
    )
    out: str | None = option(
        None,
        "folder of the answer files, with a folder for each of several benchmarks (default: "
        "data/BENCH/model_answer)",
        metavar="DIR",
    )
    model_id: str | None = option(
        None, "beginning of the names of the answer files (default: the model's name)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if a question failed, else 0."""
    parser = OptionParser(
        prog="python -m evaluation.compare",
        description="Answer questions with several methods in turn, each into an answer file of its own.",
        epilog=EXAMPLES,
    )
    add_options(parser.add_argument_group("comparison"), ComparisonOptions)
    add_options(parser.add_argument_group("model"), ModelOptions)
    questions = parser.add_argument_group("questions")
    default = QuestionOptions().bench_name
    questions.add_argument(
        "--bench-name",
        nargs="+",
        default=[default],
        metavar="NAME",
        help=f"benchmarks: folders in data/ with a question.jsonl (default: {default})",
    )
    add_options(questions, QuestionOptions, QUESTIONS)
    add_options(parser.add_argument_group("sampling"), DecodingOptions)
    add_options(parser.add_argument_group("answers"), AnswerOptions, ANSWERS)
    given = vars(parser.parse_args(argv))
    options, benches = config_of(ComparisonOptions, given), given.pop("bench_name")
    out, name = options.out, given.pop("model_id", None)
    if options.in_order and "shuffle" in given:
        raise UserError("in_order, shuffle: got both; leave one out")
    given["shuffle"] = None if options.in_order else options.shuffle
    with user_errors():
        runs = {bench: RunConfig.of(given | {"bench_name": bench}) for bench in benches}
        AnswerOptions(model_id=name)
    question_file = given.get("question_file")
    if len(set(benches)) < len(benches):
        raise UserError(f"bench_name: got {' '.join(benches)}; allowed: each once")
    if question_file and len(benches) > 1:
        raise UserError(
            f"question_file: got it with --bench-name {' '.join(benches)}; leave one of them out"
        )
    for bench in benches:  # before the first of them is answered
        question_file_of(bench, question_file)
    model_path = runs[benches[0]].model.model_path
    participants = participants_of(
        options.methods or DEFAULT_METHODS, model_path, options.draft_model
    )
    is_one = len(benches) == 1
    codes = []
    for bench, run in runs.items():
        folder = out if is_one or not out else f"{out}/{bench}"
        codes.append(compare_methods(participants, run, folder, name, options.runs))
    return max(codes)


if __name__ == "__main__":
    run_command(main)
