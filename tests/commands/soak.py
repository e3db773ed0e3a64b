"""Answer thousands of questions in one process, and watch its memory, open files and speed.

A leak or a slow-down shows in a table with one line for every block of questions. Questions come round
again when the file is through, so that a hot memory is as full as it gets. Linux only (/proc).

Examples:
    python -m tests.commands.soak --num-questions 300 --block 100
    python -m tests.commands.soak --bench-name spec_bench --num-questions 3000 --methods recycling hybrid
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch

from evaluation.inference.answering import Answerer, Prompt
from evaluation.inference.command import participants_of
from evaluation.inference.config import QuestionOptions, RunConfig
from evaluation.inference.plan import Asked, OtherProgram, Participant, Plan, check_asked
from evaluation.inference.run import answerer_of
from evaluation.reporting.tables import markdown_table
from model.backends.proofs.support import context_limit
from model.commands.command_line import (
    OptionParser,
    UserError,
    add_options,
    run_command,
    user_errors,
)
from model.commands.loading import CheckedModel, load_target, make_drafter
from model.commands.model_options import ModelOptions
from model.machine.timing import progress
from model.methods import Method
from model.methods.sps.drafter import check_draft_model

MODEL = ("model_path", "dtype", "device", "threads", "allow_pickle")
# Options that are those of a run.
RUN = (*MODEL, "bench_name", "question_file", "max_new_tokens")
# Growth of memory from the second block to the last that still counts as flat.
FLAT_GROWTH = 0.05


class Block(NamedTuple):
    """Figures at the end of a block of questions."""

    questions: int  # answered so far
    resident_bytes: int  # memory of the process at the end of the block
    open_files: int  # descriptors at the end of the block
    mean_accepted_tokens: float  # tokens a step
    tokens_per_second: float  # end to end


def soak(answerer: Answerer, prompts: Sequence[Prompt], total: int, size: int) -> list[Block]:
    """Answer `total` prompts, going round, in blocks of `size`."""
    blocks, source = [], cycle(prompts)
    with progress(total=total, unit="question") as bar:
        for begin in range(0, total, size):
            answers = []
            for prompt in islice(source, min(size, total - begin)):
                answers.append(answerer.answer(prompt))
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
    parser = OptionParser(prog="python -m tests.commands.soak", description=__doc__)
    parser.add_argument("--methods", nargs="+", default=["recycling"], help="(%(default)s)")
    parser.add_argument(
        "--draft-model", help="of sps (default: the demo model's with the demo model)"
    )
    add_options(parser, QuestionOptions, ("bench_name", "question_file"))
    parser.add_argument("--num-questions", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--block", type=int, default=100, help="questions of a line (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(%(default)s)")
    add_options(parser, ModelOptions, MODEL)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if something grew."""
    args = build_parser().parse_args(argv)
    if args.num_questions < 1 or args.block < 1:
        raise UserError(
            f"num_questions, block: got {args.num_questions}, {args.block}; allowed: 1 or more"
        )
    with user_errors():
        run = RunConfig.of({name: value for name, value in vars(args).items() if name in RUN})
    participants = participants_of(
        args.methods, run.model.model_path, args.draft_model, needs_baseline=False
    )
    asked = check_asked(run)
    prompts = first_prompts(asked)
    for participant in participants:
        check_entrant(participant, run, asked.model)
    target = load_target(run.model, asked.model)
    found = {}
    for participant in participants:
        found[participant.words] = blocks = soak(
            answerer_of(Plan(participant, run, asked, participant.label, None), target),
            prompts,
            args.num_questions,
            args.block,
        )
        body = [
            [
                str(block.questions),
                f"{block.resident_bytes / 2**20:.0f} MiB",
                str(block.open_files),
                f"{block.mean_accepted_tokens:.2f}",
                f"{block.tokens_per_second:.1f}",
            ]
            for block in blocks
        ]
        print(f"\n{participant.words}: {'flat' if is_flat(blocks) else 'GROWS'}\n")
        print(markdown_table(["questions", "memory", "open files", "MAT", "tokens/s"], body))
    print(json.dumps({name: [it._asdict() for it in blocks] for name, blocks in found.items()}))
    return 0 if all(map(is_flat, found.values())) else 1


def first_prompts(asked: Asked) -> list[Prompt]:
    """Return the prompts of the questions' first turns.

    Raises:
        UserError: if one leaves the model no room for an answer.
    """
    prompts = []
    for question in asked.questions:
        ids = asked.conversation.prompt_ids([], question.turns[0])
        prompts.append(Prompt(ids, 0, question, 0, 0, ()))
        length = len(ids)
        limit = context_limit(asked.model.hf_config.get_text_config(decoder=True))
        if not 1 <= length < (limit or math.inf):
            raise UserError(
                f"question {question.question_id!r}: got a prompt of {length} tokens; allowed: 1 or more"
                + (f", fewer than the model's context of {limit}" if limit else "")
                + "; leave the question out"
            )
    return prompts


def check_entrant(participant: Participant, run: RunConfig, model: CheckedModel) -> None:
    """Refuse a participant whose draft model or heads do not go with the model, before the weights load.

    Raises:
        UserError: with the reason.
    """
    if isinstance(participant.method, OtherProgram):
        participant.method.check(run, participant.config)
    draft_model = getattr(participant.config, "draft_model", None)
    if model.vocab_size is None:
        return
    with user_errors():
        if draft_model is not None:
            check_draft_model(draft_model, model.vocab_size)
        elif (
            isinstance(participant.method, Method)
            and participant.method.drafter_class.drafts_with() == "heads"
        ):
            # On the CPU: the weights of the model need the device's memory.
            cpu = torch.device("cpu")
            drafter = make_drafter(
                participant.method, participant.config, model.vocab_size, cpu, {}
            )
            drafter.check_config(model.hf_config.get_text_config(decoder=True))


if __name__ == "__main__":
    run_command(main)
