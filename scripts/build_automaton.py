"""Build the suffix automaton of a corpus, for `--automaton` of samd.

The corpus is a JSONL file, one object a line with a document's text, or any other text file, whose
documents are separated by empty lines. It is read in order until `--max-tokens` are in, so that memory stays
bounded: about 0.5 GB for a million tokens while building, and 45 bytes a token in the file.

python -m scripts.build_automaton corpus.jsonl --model-path data/demo/model --out corpus.safetensors
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from model.commands.command_line import OptionParser, run_command
from model.methods.samd.automata import BOUNDARY, StaticAutomaton, SuffixAutomaton
from scripts.build_datastore import add_arguments, tokenised


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(prog="python -m scripts.build_automaton", description=__doc__)
    parser.add_argument("corpus", type=Path, help="JSONL file, one document a line, or a text file")
    add_arguments(parser, usual_tokens=1_000_000)
    args = parser.parse_args(argv)
    start = time.perf_counter()
    documents = tokenised([args.corpus], args)
    automaton = SuffixAutomaton()
    for token_ids in documents:
        automaton.extend([*token_ids, BOUNDARY])
    static = StaticAutomaton.from_automaton(automaton)
    static.save(args.out)
    print(
        f"{sum(map(len, documents))} tokens of {len(documents)} documents, {len(static.links)} states, "
        f"{len(static.arrays['edge_tokens'])} transitions, {static.num_bytes / 2**20:.2f} MiB in "
        f"{args.out}; built in {time.perf_counter() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
