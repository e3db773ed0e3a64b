"""Training text of heads: files to documents of token ids, and documents to batches.

Shapes: B documents, T tokens of the longest one in a batch.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from model.commands.command_line import UserError
from model.commands.files import parse_json

# Batches of about one length are cut from this many documents, so that padding stays small.
POOL = 512


class Document(NamedTuple):
    token_ids: list[int]  # prompt and answer, or plain text
    begin: int  # first token that is learned; what comes before it is read only


class TrainingBatch(NamedTuple):
    token_ids: torch.Tensor  # int64 [B, T], padded at the end
    is_learned: torch.Tensor  # bool [B, T], whether a token is one to predict


def read_documents(files: Sequence[Path], tokenizer: Any, max_length: int) -> list[Document]:
    """Read JSON lines (`prompt` and `response`, or `text`) and plain text, .gz or not.

    Of a prompt with its response the response alone is learned. Documents are cut at `max_length` tokens;
    plain text is cut into documents of that length.

    Raises:
        UserError: if a file cannot be read, a row is of another form, or there is nothing to learn.
    """
    found: list[Document] = []
    for file in files:
        if ".jsonl" in file.suffixes:
            for number, line in enumerate(_text(file).splitlines(), start=1):
                where = f"text {file} line {number}"
                found.append(_document(parse_json(line, where), tokenizer, where))
        else:
            ids = tokenizer(_text(file)).input_ids
            parts = range(0, len(ids), max_length)
            found += [Document(ids[at : at + max_length], 0) for at in parts]
    kept = [Document(ids[:max_length], begin) for ids, begin in found if begin < max_length - 1]
    kept = [each for each in kept if len(each.token_ids) >= 4]
    if not kept:
        raise UserError(f"text: got nothing to learn in {', '.join(map(str, files))}")
    return kept


def _document(row: Any, tokenizer: Any, where: str) -> Document:
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return Document(tokenizer(row["text"]).input_ids, 0)
    if not isinstance(row, dict) or not all(
        isinstance(row.get(key), str) for key in ("prompt", "response")
    ):
        raise UserError(f"{where}: allowed: an object with prompt and response, or with text")
    if tokenizer.chat_template is None:
        raise UserError(
            f"{where}: has a prompt, and the tokenizer has no chat template; give rows with text"
        )
    user = {"role": "user", "content": row["prompt"]}
    answer = {"role": "assistant", "content": row["response"]}
    asked = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([user, answer], tokenize=False)
    # The template writes the special tokens itself.
    prompt_ids = tokenizer(asked, add_special_tokens=False).input_ids
    if not whole.startswith(asked):  # such as templates that cut the prompt's last space
        ids = tokenizer(whole, add_special_tokens=False).input_ids
        return Document(ids, min(len(prompt_ids), len(ids)))
    response_ids = tokenizer(whole[len(asked) :], add_special_tokens=False).input_ids
    return Document(prompt_ids + response_ids, len(prompt_ids))


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"text: cannot read {file}: {error}") from error


def batches_of_epoch(
    documents: Sequence[Document], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Return the batches of an epoch as indices of documents; the same for the same arguments."""
    source = random.Random(f"{seed} {epoch}")
    order = source.sample(range(len(documents)), len(documents))
    batches: list[list[int]] = []
    for begin in range(0, len(order), POOL):
        pool = sorted(order[begin : begin + POOL], key=lambda at: len(documents[at].token_ids))
        batch: list[int] = []
        for at in pool:
            if batch and (len(batch) + 1) * len(documents[at].token_ids) > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(at)
        batches.append(batch)
    source.shuffle(batches)
    return batches


def collate(documents: Sequence[Document], device: torch.device) -> TrainingBatch:
    length = max(len(each.token_ids) for each in documents)
    token_ids = torch.zeros(len(documents), length, dtype=torch.long)
    is_learned = torch.zeros(len(documents), length, dtype=torch.bool)
    for row, (ids, begin) in enumerate(documents):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        is_learned[row, begin : len(ids)] = True
    return TrainingBatch(token_ids.to(device), is_learned.to(device))
