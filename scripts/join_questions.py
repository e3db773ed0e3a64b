"""Join prompts of a question file to long ones, for measurements with contexts of thousands of tokens.

Each new question has the first turns of several questions of one category in one prompt. A prompt of Spec-Bench's
retrieval (`rag`) or summaries has some 700 tokens: six make about 4,000.

Run:
    python -m scripts.join_questions data/spec_bench/question.jsonl --categories rag summarization --num-joined 6 \
        --out data/long/question.jsonl
    python -m evaluation.compare --bench-name long --prompt-tokens 3500:4700 --max-new-tokens 96
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from evaluation.questions.questions import load_questions
from evaluation.reporting.options import make_folder
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import write_whole
from model.options import unknown_name


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="python -m scripts.join_questions", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="question file (JSONL)")
    parser.add_argument(
        "--categories",
        nargs="+",
        metavar="NAME",
        help="categories whose questions are joined, each with its own (default: all)",
    )
    parser.add_argument(
        "--num-joined",
        type=int,
        default=6,
        metavar="N",
        help="questions in a prompt (default: %(default)s); fewer at a category's end are left out",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="question file to write"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the joined questions."""
    args = build_parser().parse_args(argv)
    if args.num_joined < 2:
        raise UserError(f"num_joined: got {args.num_joined}; allowed: 2 or more")
    by_category: dict[str, list[str]] = {}
    for question in load_questions(args.file):
        by_category.setdefault(question.category, []).append(question.turns[0])
    for name in args.categories or ():
        if name not in by_category:
            raise UserError(unknown_name("categories", name, list(by_category)))
    rows = [
        {
            "question_id": f"{name}-{place // args.num_joined + 1}",
            "category": name,
            "turns": ["\n\n".join(prompts[place : place + args.num_joined])],
        }
        for name in dict.fromkeys(args.categories or by_category)
        for prompts in [by_category[name]]
        for place in range(0, len(prompts) - args.num_joined + 1, args.num_joined)
    ]
    if not rows:
        most = max(map(len, by_category.values()))
        raise UserError(
            f"num_joined: got {args.num_joined}; allowed: 2 to {most}, the questions of a category"
        )
    make_folder(args.out.parent)
    write_whole(args.out, "".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{len(rows)} questions of {args.num_joined} prompts each in {args.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
