r"""Build the datastore that rest drafts from: the tokens of texts, and their suffix array.

A text is a JSONL file with one document a line, or any other text file, whose documents are separated by
empty lines. Texts are read in order until `--max-tokens` are in, so that memory stays bounded: about 80
bytes a token while building, and 8 in the file.

python -m scripts.build_datastore --text README.md docs/*.md --model-path data/demo/model \
    --out data/demo/datastore.npy
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import check_output, refuse_outputs, replace_file
from model.methods.rest.datastore import Datastore
from scripts.corpus import load_tokenizer, tokenised

# Places are int32, and the keys that are sorted are products of two of them.
MOST_TOKENS = 2**30


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = OptionParser(prog="python -m scripts.build_datastore", description=__doc__)
    parser.add_argument(
        "--text", required=True, nargs="+", metavar="FILE", help="JSONL or text files"
    )
    parser.add_argument("--model-path", required=True, help="folder or hub name of the model")
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument(
        "--field", default="text", help="key of a JSONL document's text (%(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=5_000_000, help="tokens read at most (%(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Build and save a datastore."""
    args = build_parser().parse_args(argv)
    if not 1 <= args.max_tokens <= MOST_TOKENS:
        raise UserError(f"max_tokens: got {args.max_tokens}; allowed: 1 to {MOST_TOKENS}")
    out = Path(args.out)
    check_output(out, "out")
    refuse_outputs([out], args.text)
    tokenizer = load_tokenizer(args.model_path)
    start = time.perf_counter()
    files = [Path(file) for file in args.text]
    documents = [*tokenised(files, args.field, tokenizer, args.max_tokens)]
    datastore = Datastore.build(documents)
    replace_file(out, datastore.save)
    print(
        f"{sum(map(len, documents))} tokens of {len(documents)} documents, "
        f"{out.stat().st_size / 2**20:.2f} MB in {out}; built in {time.perf_counter() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
