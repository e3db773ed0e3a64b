"""Build the suffix automaton of a corpus, for `--automaton` of samd.

The corpus is a JSONL file: one object a line with a document's text. It is read in order until
`--max-tokens` are in, so that memory stays bounded: about 0.5 GB for a million tokens while
building, and 45 bytes a token in the file.

python -m scripts.build_automaton corpus.jsonl --tokenizer data/demo/model --out corpus.safetensors
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from evaluation.answers.progress import progress
from model.commands.command_line import OptionParser, UserError, first_line, run_command
from model.commands.files import check_output, parse_json, refuse_outputs
from model.methods.samd.static_automaton import BOUNDARY, StaticAutomaton
from model.methods.samd.suffix_automaton import SuffixAutomaton


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = OptionParser(prog="python -m scripts.build_automaton", description=__doc__)
    parser.add_argument("corpus", help="JSONL file, one document a line")
    parser.add_argument("--tokenizer", required=True, help="folder or hub name of the model")
    parser.add_argument("--out", required=True, help="safetensors file to write")
    parser.add_argument("--field", default="text", help="key of a document's text (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=1_000_000, help="tokens read at most (%(default)s)"
    )
    return parser


def documents(corpus: Path, field: str) -> Iterator[str]:
    """Yield the texts of a JSONL file.

    Raises:
        UserError: naming file and line of the first mistake.
    """
    try:
        with corpus.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row = parse_json(line, f"corpus {corpus}, line {number}")
                text = row.get(field) if isinstance(row, dict) else None
                if not isinstance(text, str):
                    raise UserError(
                        f"corpus {corpus}, line {number}: expected an object with a text under "
                        f"{field!r}; see --field"
                    )
                yield text
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"corpus {corpus}: cannot be read: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Build and save an automaton."""
    args = build_parser().parse_args(argv)
    if args.max_tokens < 1:
        raise UserError(f"max_tokens: got {args.max_tokens}; allowed: 1 or more")
    out = Path(args.out)
    check_output(out, "out")
    refuse_outputs([out], [args.corpus])
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    except Exception as error:  # transformers raises many types for a missing or broken tokenizer
        raise UserError(f"tokenizer {args.tokenizer}: {first_line(error)}") from error
    automaton = SuffixAutomaton()
    num_documents = num_tokens = 0
    start = time.perf_counter()
    with progress(total=args.max_tokens, unit="token") as bar:
        for text in documents(Path(args.corpus), args.field):
            token_ids = tokenizer(text, add_special_tokens=False).input_ids
            token_ids = token_ids[: args.max_tokens - num_tokens]
            automaton.extend([*token_ids, BOUNDARY])
            num_documents += 1
            num_tokens += len(token_ids)
            bar.update(len(token_ids))
            if num_tokens == args.max_tokens:
                break
    if not num_tokens:
        raise UserError(f"corpus {args.corpus}: holds no text")
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
