"""Build the suffix automaton of a corpus, for `--automaton` of samd.

The corpus is a JSONL file, one object a line with a document's text, or any other text file, whose
documents are separated by empty lines. It is read in order until `--max-tokens` are in, so that memory stays
bounded: about 0.5 GB for a million tokens while building, and 45 bytes a token in the file.

python -m scripts.build_automaton corpus.jsonl --model-path data/demo/model --out corpus.safetensors
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import check_output, refuse_outputs
from model.methods.samd.automata import BOUNDARY, StaticAutomaton, SuffixAutomaton
from scripts.build_datastore import load_tokenizer, tokenised


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="python -m scripts.build_automaton", description=__doc__)
    parser.add_argument("corpus", help="JSONL file, one document a line, or a text file")
    parser.add_argument(
        "--model-path", "--tokenizer", required=True, help="folder or hub name of the model"
    )
    parser.add_argument("--out", required=True, help="safetensors file to write")
    parser.add_argument("--field", default="text", help="key of a document's text (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=1_000_000, help="tokens read at most (%(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.max_tokens < 1:
        raise UserError(f"max_tokens: got {args.max_tokens}; allowed: 1 or more")
    out = Path(args.out)
    check_output(out, "out")
    refuse_outputs([out], [args.corpus])
    tokenizer = load_tokenizer(args.model_path)
    automaton = SuffixAutomaton()
    num_documents = num_tokens = 0
    start = time.perf_counter()
    for token_ids in tokenised([Path(args.corpus)], args.field, tokenizer, args.max_tokens):
        automaton.extend([*token_ids, BOUNDARY])
        num_documents += 1
        num_tokens += len(token_ids)
    seconds = time.perf_counter() - start
    static = StaticAutomaton.from_automaton(automaton)
    static.save(out)
    print(
        f"{num_tokens} tokens of {num_documents} documents, {len(static.links)} states, "
        f"{len(static.arrays['edge_tokens'])} transitions, {static.num_bytes / 2**20:.2f} MB in "
        f"{out}; built in {seconds:.1f} s"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
