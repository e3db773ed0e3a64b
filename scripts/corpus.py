"""Corpora: the documents of JSONL and text files, and their tokens up to a limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from evaluation.answers.progress import progress
from model.commands.command_line import UserError, first_line
from model.commands.files import parse_json

MOST_LINES = 1000  # of a document of a text file


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
    """Yield the texts of a JSONL file's lines."""
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
