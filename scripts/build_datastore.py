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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from model.commands.command_line import OptionParser, UserError, first_line, run_command
from model.commands.files import check_output, parse_json, refuse_outputs, replace_file
from model.machine.timing import progress
from model.methods.rest.datastore import Datastore

MOST_LINES = 1000  # of a document of a text file
# Places are int32, and the keys that are sorted are products of two of them.
MOST_TOKENS = 2**30


def documents(corpus: Path, field: str) -> Iterator[str]:
    """Yield the documents of a file: of a JSONL file one a line, of any other those between empty lines.

    Raises:
        UserError: naming file and line of the first mistake.
    """
    try:
        with corpus.open(encoding="utf-8") as lines:
            is_jsonl = corpus.suffix in (".jsonl", ".json")
            yield from _rows(lines, corpus, field) if is_jsonl else _paragraphs(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"corpus {corpus}: cannot be read: {error}") from error


def _rows(lines: Iterable[str], corpus: Path, field: str) -> Iterator[str]:
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


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Yield what stands between empty lines; a long stretch in parts, so that memory stays bounded."""
    part: list[str] = []
    for line in lines:
        if line.strip():
            part.append(line)
        if part and (not line.strip() or len(part) == MOST_LINES):
            yield "".join(part)
            part = []
    if part:
        yield "".join(part)


def add_arguments(parser: OptionParser, usual_tokens: int) -> None:
    add = parser.add_argument
    add("--model-path", "--tokenizer", required=True, help="folder or hub name of the model")
    add("--out", required=True, type=Path, help="file to write")
    add("--field", default="text", help="key of a JSONL document's text (%(default)s)")
    add("--max-tokens", type=int, default=usual_tokens, help="tokens read at most (%(default)s)")


def tokenised(corpora: Sequence[Path], args: argparse.Namespace) -> list[list[int]]:
    """Return the tokens of each document of several files, until `--max-tokens` are read.

    Raises:
        UserError: if an option cannot be used, naming file and line of the first mistake, or if there is no text.
    """
    if not 1 <= args.max_tokens <= MOST_TOKENS:
        raise UserError(f"max_tokens: got {args.max_tokens}; allowed: 1 to {MOST_TOKENS}")
    check_output(args.out, "out")
    refuse_outputs([args.out], corpora)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    except Exception as error:  # transformers raises many types for a missing or broken tokenizer
        raise UserError(f"tokenizer {args.model_path}: {first_line(error)}") from error
    found: list[list[int]] = []
    num_left = args.max_tokens
    with progress(total=num_left, unit="token") as bar:
        for text in (text for corpus in corpora for text in documents(corpus, args.field)):
            found.append(tokenizer(text, add_special_tokens=False).input_ids[:num_left])
            num_left -= len(found[-1])
            bar.update(len(found[-1]))
            if not num_left:
                break
    if num_left == args.max_tokens:
        raise UserError(f"corpus {corpora[0]}: holds no text")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(prog="python -m scripts.build_datastore", description=__doc__)
    parser.add_argument(
        "--text", required=True, nargs="+", metavar="FILE", type=Path, help="JSONL or text files"
    )
    add_arguments(parser, usual_tokens=5_000_000)
    args = parser.parse_args(argv)
    start = time.perf_counter()
    found = tokenised(args.text, args)
    replace_file(args.out, Datastore.build(found).save)
    print(
        f"{sum(map(len, found))} tokens of {len(found)} documents, "
        f"{args.out.stat().st_size / 2**20:.2f} MiB in {args.out}; built in {time.perf_counter() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
