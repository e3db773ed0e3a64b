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
from typing import Any

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


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model.

    Raises:
        UserError: if it is missing or broken.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises many types for a missing or broken tokenizer
        raise UserError(f"tokenizer {name}: {first_line(error)}") from error


def tokenised(
    corpora: Sequence[Path], field: str, tokenizer: Any, max_tokens: int
) -> Iterator[list[int]]:
    """Yield the tokens of each document of several files, until `max_tokens` are read.

    Raises:
        UserError: naming file and line of the first mistake, or if there is no text.
    """
    num_tokens = 0
    texts = (text for corpus in corpora for text in documents(corpus, field))
    with progress(total=max_tokens, unit="token") as bar:
        for text in texts:
            token_ids = tokenizer(text, add_special_tokens=False).input_ids
            token_ids = token_ids[: max_tokens - num_tokens]
            yield token_ids
            num_tokens += len(token_ids)
            bar.update(len(token_ids))
            if num_tokens == max_tokens:
                break
    if not num_tokens:
        raise UserError(f"corpus {corpora[0]}: holds no text")


def build_parser() -> argparse.ArgumentParser:
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
