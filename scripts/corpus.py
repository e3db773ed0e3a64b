"""Corpora: the texts of a JSONL file, and their tokens up to a limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from evaluation.answers.progress import progress
from model.commands.command_line import UserError, first_line
from model.commands.files import parse_json


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


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model.

    Raises:
        UserError: if it is missing or broken.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises many types for a missing or broken tokenizer
        raise UserError(f"tokenizer {name}: {first_line(error)}") from error


def tokenised(corpus: Path, field: str, tokenizer: Any, max_tokens: int) -> Iterator[list[int]]:
    """Yield the tokens of each document, until `max_tokens` are read.

    Raises:
        UserError: naming file and line of the first mistake, or if there is no text.
    """
    num_tokens = 0
    with progress(total=max_tokens, unit="token") as bar:
        for text in documents(corpus, field):
            token_ids = tokenizer(text, add_special_tokens=False).input_ids
            token_ids = token_ids[: max_tokens - num_tokens]
            yield token_ids
            num_tokens += len(token_ids)
            bar.update(len(token_ids))
            if num_tokens == max_tokens:
                break
    if not num_tokens:
        raise UserError(f"corpus {corpus}: holds no text")
