"""Training text of the demo model: rows, tokenizer, chats, packed batches; and what a loop is."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pandas
from transformers import PreTrainedTokenizerFast

from model.commands.model_options import DEFAULT_MODEL

CONTEXT = 3072  # tokens; the longest Spec-Bench prompt has 1,900, and 1,024 new ones still fit
MAX_RESPONSE = 256  # tokens; rows with a longer response are left out
PROMPT_WEIGHT, EOS_WEIGHT = 0.3, 2.0  # in the loss; any other token of a response has 1
TWO_TURN_SHARE = 0.1  # chats that take a second turn
PACKED = 768  # tokens of a packed sequence; longer chats are sequences of their own
TOKENS_PER_STEP = 4608
LOOP_WINDOW, MAX_PERIOD = 24, 12  # tokens


class ChatTurn(NamedTuple):
    """One exchange as token ids, without the leading bos."""

    prompt_ids: list[int]  # "USER: ... ASSISTANT:"
    response_ids: list[int]  # " ...</s>"


class TrainingText(NamedTuple):
    """A training sequence, with the loss weight of each token."""

    token_ids: list[int]
    weights: list[float]


def find_loop(token_ids: Sequence[int]) -> int | None:
    """Return after how many tokens the last `LOOP_WINDOW` have a period of at most `MAX_PERIOD`; None if never.

    Looped text is easy to draft, so it flatters every method: training avoids it, and replay counts it.
    """
    for end in range(LOOP_WINDOW, len(token_ids) + 1):
        tail = token_ids[end - LOOP_WINDOW : end]
        for period in range(1, MAX_PERIOD + 1):
            if tail[period:] == tail[:-period]:
                return end
    return None


def read_rows(path: Path) -> list[tuple[str, str]]:
    """Read the pairs of `prompt` and `response` of a JSONL(.gz) file."""
    try:
        table = pandas.read_json(path, lines=True, dtype=False)[["prompt", "response"]].dropna()
    except (ValueError, KeyError) as problem:
        allowed = "JSON objects with prompt and response, one a line"
        raise ValueError(f"corpus {path.name}: got {problem}; allowed: {allowed}") from problem
    return [(prompt.strip(), response.strip()) for prompt, response in table.to_numpy()]


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is never learned from: one in fifty."""
    return zlib.crc32(prompt.encode()) % 50 == 0


def train_tokenizer(rows: Sequence[tuple[str, str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on rendered chats; `vocab_size` includes the special tokens.

    All but the merges is the demo model's, as its tokenizer.json has it: GPT-2's word pattern, but one
    digit a token (sums are easier to learn digit by digit), a bos before plain text as with Llama, and
    Vicuna v1.1's chat format. That writes a system message only when the caller gives one, because
    forty tokens of preamble cost a small model more than they tell it.
    """
    texts = (f"USER: {prompt} ASSISTANT: {response}" for prompt, response in rows)
    own = PreTrainedTokenizerFast.from_pretrained(DEFAULT_MODEL)
    return own.train_new_from_iterator(texts, vocab_size, show_progress=False)


def encode_turns(
    rows: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> list[ChatTurn]:
    """Tokenize rows; rows that are too long or loop themselves are left out."""
    turns, eos = [], tokenizer.eos_token
    for prompt, response in rows:
        prompt_ids = tokenizer.encode(f"USER: {prompt} ASSISTANT:", add_special_tokens=False)
        response_ids = tokenizer.encode(f" {response}{eos}", add_special_tokens=False)
        fits = len(prompt_ids) + len(response_ids) < CONTEXT
        if fits and len(response_ids) <= MAX_RESPONSE and find_loop(response_ids) is None:
            turns.append(ChatTurn(prompt_ids, response_ids))
    return turns


def _chats(turns: Sequence[ChatTurn], bos: int, rng: random.Random) -> Iterator[TrainingText]:
    order = iter(rng.sample(turns, len(turns)))
    for turn in order:
        own = [turn, *islice(order, int(rng.random() < TWO_TURN_SHARE))]
        chat = TrainingText([bos], [0.0])
        for prompt, response in own:
            chat.token_ids.extend(prompt + response)
            chat.weights.extend([PROMPT_WEIGHT] * len(prompt))
            chat.weights.extend([1.0] * (len(response) - 1) + [EOS_WEIGHT])
        if len(chat.token_ids) <= CONTEXT:  # but for a few chats of two long turns
            yield chat


def pack_epoch(turns: Sequence[ChatTurn], bos: int, seed: int) -> list[list[TrainingText]]:
    """Pack every turn once into batches of about `TOKENS_PER_STEP` tokens; no chat is cut."""
    rng = random.Random(seed)
    texts: list[TrainingText] = []
    for chat in _chats(turns, bos, rng):
        if texts and len(texts[-1].token_ids) + len(chat.token_ids) <= PACKED:
            texts[-1].token_ids.extend(chat.token_ids)
            texts[-1].weights.extend(chat.weights)
        else:
            texts.append(chat)
    batches: list[list[TrainingText]] = []
    for text in sorted(texts, key=lambda text: len(text.token_ids)):  # pads little
        if not batches or sum(len(each.token_ids) for each in batches[-1]) >= TOKENS_PER_STEP:
            batches.append([])
        batches[-1].append(text)
    rng.shuffle(batches)
    return batches
