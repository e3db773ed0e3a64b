r"""Compare methods in one process, interleaved question by question, and time a step on this device.

Wall-clock figures of separate processes drift with the machine. Here every method answers a
question before the next question comes, in an order that rotates, and figures are ratios within the
run, with intervals. The referees are transformers' own `generate`, its prompt lookup and its assisted
generation, so that the baseline is seen to be honest.

Examples:
    python -m scripts.benchmark
    python -m scripts.benchmark --shape 150m --dtype bfloat16 --num-questions 12 \
        --methods vanilla recycling recycling-auto
    python -m scripts.benchmark --random-prompts --methods vanilla recycling-auto hybrid
    python -m scripts.benchmark --methods vanilla sps sps-auto generate generate-assisted
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from evaluation.answering.entrants import entrants_of
from evaluation.answering.interleaved import in_turn
from evaluation.answers.progress import progress
from evaluation.answers.row import Turn
from evaluation.questions.conversation import choose_conversation
from evaluation.questions.questions import Question, load_questions, question_file_of
from evaluation.reporting.tables import json_line
from evaluation.scoring.per_question import task_of
from model.budget.threads import use_fastest_threads
from model.commands.command_line import OptionParser, UserError, user_errors
from model.commands.files import check_output, refuse_outputs, write_whole
from model.commands.loading import CheckedModel, check_model, load_target, target_of
from model.commands.model_options import DEFAULT_MODEL, ModelOptions, SamplingOptions
from model.commands.options import add_options
from model.commands.options import config_of as options_of
from model.engine.support import eos_ids_of
from model.engine.target import TargetModel
from scripts.benchmark.device_costs import (
    CONTEXTS,
    choose_contexts,
    conditions,
    cost_curve,
    roofline,
)
from scripts.benchmark.methods import Method, check_draft_models, first_prompts, ready
from scripts.benchmark.report import print_tables, summarise
from scripts.enlarge.arithmetic import SHAPES, scale_config
from scripts.enlarge.command import scaled_model

NODES = (1, 2, 4, 8, 16, 32, 64, 81, 128)
DEFAULT_METHODS = (
    *("vanilla", "recycling", "recycling-auto", "pld", "lookahead", "hybrid"),
    *("generate", "generate-pld"),
)
RANDOM_PROMPT_TOKENS = 200


def measure(
    methods: dict[str, Method],
    prompts: Sequence[list[int]],
    num_repetitions: int,
    longest: int = 0,
) -> dict[str, list[list[Turn]]]:
    """Return answers[method][repetition][question], interleaved, after one unmeasured answer of
    each method, and after each is prepared for texts of up to `longest` tokens.

    Memory is cleared before every repetition: nobody drafts from his own earlier answer to the same
    question.
    """
    names = list(methods)
    for name in names:
        methods[name].answer(prompts[0])
    for method in methods.values():
        method.prepare(longest)
    answers: dict[str, list[list[Turn]]] = {name: [] for name in names}
    total = num_repetitions * len(prompts) * len(names)
    with progress(total=total, unit="answer") as bar:
        for _ in range(num_repetitions):
            for name in names:
                methods[name].reset()
                answers[name].append([])
            for index, name in in_turn(names, len(prompts)):
                answers[name][-1].append(methods[name].answer(prompts[index]))
                bar.update()
    return answers


def spread(questions: list[Question], count: int) -> list[Question]:
    """Return `count` questions evenly spread over the file, so that every category has its share."""
    if count >= len(questions):
        return questions
    return [
        questions[round(index * (len(questions) - 1) / max(1, count - 1))] for index in range(count)
    ]


def random_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of random tokens, the same every time."""
    source = random.Random(0)
    return [
        [source.randrange(vocab_size) for _ in range(RANDOM_PROMPT_TOKENS)] for _ in range(count)
    ]


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = OptionParser(
        prog="python -m scripts.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=DEFAULT_METHODS,
        help="as for evaluation.compare: methods, METHOD-auto, methods with options, and the referees "
        "(default: %(default)s)",
    )
    parser.add_argument("--model-path", default=DEFAULT_MODEL, help="folder or hub name")
    parser.add_argument(
        "--draft-model",
        help="folder or hub name of the model that sps and generate-assisted draft with (default: the "
        "demo model's)",
    )
    parser.add_argument(
        "--shape",
        default="demo",
        choices=("demo", *SHAPES),
        help="enlarge the demo model in memory",
    )
    parser.add_argument("--bench-name", help="benchmark in data/, first turns (default: demo)")
    parser.add_argument(
        "--question-file", help="JSONL file of questions, instead of --bench-name's"
    )
    parser.add_argument(
        "--num-questions", type=int, default=30, help="evenly spread over the file (%(default)s)"
    )
    parser.add_argument(
        "--random-prompts",
        action="store_true",
        help="prompts of random tokens instead of questions: text in which nothing repeats",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, help="limit of an answer (%(default)s)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=3, help="measured answers to each question (%(default)s)"
    )
    add_options(parser, ModelOptions, ("dtype", "device", "threads", "graphs", "allow_pickle"))
    parser.add_argument(
        "--compile", action="store_true", help="static shapes through torch.compile"
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        help=f"of the cost curve (default: {' '.join(map(str, CONTEXTS))}, as far as the model's reaches)",
    )
    parser.add_argument("--out", metavar="JSON", help="write the last line, the report, here too")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse what can be known to be wrong without a model."""
    if args.random_prompts and (args.question_file or args.bench_name):
        raise UserError(
            "random_prompts: got questions too; leave --bench-name and --question-file out"
        )
    if args.out:
        check_output(args.out, "out")
    numbers = {"num_questions": args.num_questions, "repetitions": args.repetitions}
    for name, number in (
        *numbers.items(),
        *(("contexts", context) for context in args.contexts or ()),
    ):
        if number < 1:
            raise UserError(f"{name}: got {number}; allowed: 1 or more")


def _load(args: argparse.Namespace, options: ModelOptions, model: CheckedModel) -> TargetModel:
    """Load the model, enlarged in memory if a shape was asked for."""
    if args.shape == "demo":
        return load_target(options, model)
    with user_errors():
        scale_config(model.hf_config, SHAPES[args.shape])
    small = load_target(options, model._replace(dtype=torch.float32)).model
    large = scaled_model(small, SHAPES[args.shape], model.dtype)
    return target_of(large, replace(options, compile=args.compile))


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes held so far: of the device on a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = build_parser().parse_args(argv)
    _check(args)
    entrants = entrants_of(args.methods, args.model_path, args.draft_model)
    is_compiled = args.compile and args.shape == "demo"
    options = options_of(ModelOptions, vars(args) | {"compile": is_compiled})
    with user_errors():
        sampling = SamplingOptions(max_new_tokens=args.max_new_tokens)
    file = question_file_of(args.bench_name or "demo", args.question_file)
    if args.out:
        refuse_outputs([args.out], [file])
    questions = spread(load_questions(file), args.num_questions)
    model = check_model(options)
    contexts = choose_contexts(args.contexts, model.hf_config.get_text_config(decoder=True))
    check_draft_models(entrants, model)
    conversation = choose_conversation("auto", options.model_path, model.tokenizer)
    prompts = [] if args.random_prompts else first_prompts(conversation, questions, model)
    target = _load(args, options, model)
    eos_ids = eos_ids_of(target.model, model.tokenizer) | conversation.stop_ids
    tasks = [task_of(question.category) for question in questions]
    if args.random_prompts:
        tasks = ["random"] * args.num_questions
        prompts = random_prompts(args.num_questions, target.vocab_size)
    if options.threads is None and (choice := use_fastest_threads(target)):
        print(f"{choice}; --threads sets it", file=sys.stderr)
    methods = {entrant.words: ready(entrant, target, sampling, eos_ids) for entrant in entrants}
    longest = max(map(len, prompts)) + args.max_new_tokens
    answers = measure(methods, prompts, args.repetitions, longest)
    rows = summarise(answers, tasks)
    num_late_shapes = target.num_late_shapes
    curve = cost_curve(target, NODES, contexts)
    roof = roofline(target, contexts[0], curve[0].milliseconds)
    report = {
        **conditions(argv, model),
        "shape": args.shape,
        "num_questions": len(prompts),
        "num_repetitions": args.repetitions,
        "compile": args.compile,
        "graphs": options.graphs,
        "preparation": target.preparation._asdict(),
        "shapes_compiled_in_measured_answers": num_late_shapes,
        "peak_memory_bytes": _peak_memory(model.device),
        "methods": rows,
        "cost_curve": [point._asdict() for point in curve],
        "roofline": roof._asdict(),
    }
    if args.out:  # before anything is printed: a reader such as `head` may leave
        write_whole(args.out, json_line(report) + "\n")
    print_tables(rows, curve, roof)
    print(json_line(report))
    return 0
