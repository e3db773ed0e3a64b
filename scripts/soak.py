"""Answer thousands of questions in one process, and watch its memory, open files and speed.

A leak or a slow-down shows in a table with one line for every block of questions. Questions come round
again when the file is through, so that a hot memory is as full as it gets. Linux only (/proc).

Examples:
    python -m scripts.soak --num-questions 300 --block 100
    python -m scripts.soak --bench-name spec_bench --num-questions 3000 --methods recycling hybrid
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from evaluation.answering.entrants import entrants_of
from evaluation.answers.progress import progress
from evaluation.questions.conversation import choose_conversation
from evaluation.questions.questions import load_questions, question_file_of
from evaluation.reporting.tables import markdown_table
from model.commands.command_line import OptionParser, UserError, run_command, user_errors
from model.commands.loading import check_model, load_target
from model.commands.model_options import ModelOptions, SamplingOptions
from model.commands.options import add_options, config_of
from model.engine.support import eos_ids_of
from scripts.benchmark.methods import Method, check_draft_models, first_prompts, ready

# Growth of memory from the second block to the last that still counts as flat.
FLAT_GROWTH = 0.05


class Block(NamedTuple):
    """Figures at the end of a block of questions.

    Attributes:
        questions: answered so far.
        resident_bytes: memory of the process at the end of the block.
        open_files: descriptors at the end of the block.
        mean_accepted_tokens: tokens a step.
        tokens_per_second: end to end.
    """

    questions: int
    resident_bytes: int
    open_files: int
    mean_accepted_tokens: float
    tokens_per_second: float


def soak(method: Method, prompts: Sequence[list[int]], total: int, size: int) -> list[Block]:
    """Answer `total` prompts, going round, in blocks of `size`."""
    blocks, source = [], cycle(prompts)
    with progress(total=total, unit="question") as bar:
        for begin in range(0, total, size):
            answers = []
            for prompt in islice(source, min(size, total - begin)):
                answers.append(method.answer(prompt))
                bar.update()
            tokens = sum(len(answer.token_ids) for answer in answers)
            steps = sum(len(answer.accept_lengths) for answer in answers)
            seconds = sum(answer.wall_time for answer in answers)
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGESIZE"
            )
            num_files = len(os.listdir("/proc/self/fd"))
            done = begin + len(answers)
            blocks.append(Block(done, resident, num_files, tokens / steps, tokens / seconds))
    return blocks


def is_flat(blocks: Sequence[Block]) -> bool:
    """Whether memory and open files stayed as they were after the first block, which warms up."""
    first, last = blocks[min(1, len(blocks) - 1)], blocks[-1]
    grown = last.resident_bytes / first.resident_bytes - 1
    return grown <= FLAT_GROWTH and last.open_files <= first.open_files


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = OptionParser(prog="python -m scripts.soak", description=__doc__)
    parser.add_argument("--methods", nargs="+", default=["recycling"], help="(%(default)s)")
    parser.add_argument(
        "--draft-model", help="of sps (default: the demo model's with the demo model)"
    )
    parser.add_argument("--bench-name", default="demo", help="benchmark in data/ (first turns)")
    parser.add_argument(
        "--question-file", help="JSONL file of questions, instead of --bench-name's"
    )
    parser.add_argument("--num-questions", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--block", type=int, default=100, help="questions of a line (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(%(default)s)")
    names = ("model_path", "dtype", "device", "threads", "allow_pickle")
    add_options(parser, ModelOptions, names)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if something grew."""
    args = build_parser().parse_args(argv)
    if args.num_questions < 1 or args.block < 1:
        raise UserError(
            f"num_questions, block: got {args.num_questions}, {args.block}; allowed: 1 or more"
        )
    options = config_of(ModelOptions, vars(args))
    entrants = entrants_of(args.methods, options.model_path, args.draft_model, needs_baseline=False)
    with user_errors():
        sampling = SamplingOptions(max_new_tokens=args.max_new_tokens)
    questions = load_questions(question_file_of(args.bench_name, args.question_file))
    model = check_model(options)
    check_draft_models(entrants, model)
    conversation = choose_conversation("auto", options.model_path, model.tokenizer)
    prompts = first_prompts(conversation, questions, model)
    target = load_target(options, model)
    eos_ids = eos_ids_of(target.model, model.tokenizer) | conversation.stop_ids
    found = {}
    for entrant in entrants:
        name, method = entrant.words, ready(entrant, target, sampling, eos_ids)
        found[name] = blocks = soak(method, prompts, args.num_questions, args.block)
        body = [
            [
                str(block.questions),
                f"{block.resident_bytes / 2**20:.0f} MB",
                str(block.open_files),
                f"{block.mean_accepted_tokens:.2f}",
                f"{block.tokens_per_second:.1f}",
            ]
            for block in blocks
        ]
        print(f"\n{name}: {'flat' if is_flat(blocks) else 'GROWS'}\n")
        print(markdown_table(["questions", "memory", "open files", "MAT", "tokens/s"], body))
    print(json.dumps({name: [it._asdict() for it in blocks] for name, blocks in found.items()}))
    return 0 if all(map(is_flat, found.values())) else 1


if __name__ == "__main__":
    run_command(main)
