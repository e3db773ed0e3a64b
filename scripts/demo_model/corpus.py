"""Training text of the demo model: rows, tokenizer, chat format, packing.

Reads a JSONL(.gz) corpus of `prompt` and `response`, trains a byte-level BPE tokenizer on it, and
turns rows into packed training sequences with one loss weight per token.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from scripts.demo_model.loops import find_loop

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SYSTEM_MESSAGE = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
# Vicuna v1.1's format; the system message is written only when the caller gives one, because forty
# tokens of preamble cost a small model more than they tell it.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# GPT-2's word pattern, with one digit per token: sums are easier to learn digit by digit.
WORD_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HELD_OUT_ONE_IN = 50
NUM_OPEN = 64  # sequences that still take chats while they are packed


class Row(NamedTuple):
    """One exchange of the corpus."""

    prompt: str
    response: str


class Turn(NamedTuple):
    """One exchange as token ids, without the leading bos."""

    prompt_ids: list[int]  # "USER: ... ASSISTANT:"
    response_ids: list[int]  # " ...</s>"


class Packed(NamedTuple):
    """Sequences of one length; N sequences, T tokens each."""

    token_ids: np.ndarray  # [N, T] int64
    weights: np.ndarray  # [N, T] float32: loss weight of predicting this token


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """The way from rows to training sequences; lengths in tokens."""

    prompt_weight: float = 0.3  # loss weight of a prompt token; a response token has 1
    eos_weight: float = 2.0  # loss weight of the token that ends an answer
    max_response: int = 256  # longer responses are left out
    two_turn_share: float = 0.2  # rows that become the first turn of a two-turn chat
    system_share: float = 0.03  # chats that open with Vicuna's system message
    short_length: int = 768  # of most sequences
    long_length: int = 3072  # of the long sequences
    long_share: float = 0.02  # rows that fit a short sequence but go to a long one


def read_rows(path: Path) -> list[Row]:
    """Read a JSONL or JSONL.gz file whose objects have `prompt` and `response`.

    Raises:
        ValueError: if a line is no such object, or there is no line.
    """
    rows = []
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                item = json.loads(line)
                rows.append(Row(item["prompt"].strip(), item["response"].strip()))
            except (ValueError, KeyError, TypeError, AttributeError) as problem:
                raise ValueError(
                    f"corpus {path.name} line {number}: got {problem!r}; allowed: an object with "
                    "strings prompt and response; fix or drop that line"
                ) from problem
    if not rows:
        raise ValueError(f"corpus {path.name}: got no rows; allowed: one or more")
    return rows


def is_held_out(row: Row) -> bool:
    """Whether a row is never learned from: by a hash, so that equal prompts are on one side."""
    return zlib.crc32(row.prompt.encode()) % HELD_OUT_ONE_IN == 0


def train_tokenizer(rows: Sequence[Row], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer on rendered chats.

    Args:
        rows: the text.
        vocab_size: token ids, special tokens included.
        context: longest sequence of the model, in tokens.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"USER: {row.prompt} ASSISTANT: {row.response}" for row in rows)
    bpe.train_from_iterator(texts, trainer)
    # As Llama's tokenizer does: text gets a bos unless add_special_tokens=False.
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )


def encode_turns(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerFast, config: CorpusConfig
) -> list[Turn]:
    """Tokenize rows; rows that are too long or loop themselves are left out."""
    prompts = [f"USER: {row.prompt} ASSISTANT:" for row in rows]
    responses = [f" {row.response}{EOS}" for row in rows]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    response_ids = tokenizer(responses, add_special_tokens=False)["input_ids"]
    turns = []
    for prompt, response in zip(prompt_ids, response_ids, strict=True):
        fits = len(prompt) + len(response) < config.long_length
        if fits and len(response) <= config.max_response and find_loop(response) is None:
            turns.append(Turn(prompt, response))
    return turns


class _Chat(NamedTuple):
    token_ids: list[int]
    weights: list[float]


def _chat(turns: Sequence[Turn], opening: list[int], config: CorpusConfig) -> _Chat:
    token_ids = list(opening)
    weights = [0.0] * len(opening)
    for turn in turns:
        token_ids += turn.prompt_ids + turn.response_ids
        weights += [config.prompt_weight] * len(turn.prompt_ids)
        weights += [1.0] * (len(turn.response_ids) - 1) + [config.eos_weight]
    return _Chat(token_ids, weights)


def _chats(
    turns: Sequence[Turn], tokenizer: PreTrainedTokenizerFast, config: CorpusConfig, seed: int
) -> Iterator[_Chat]:
    """Shuffle the turns and join some pairs of them into two-turn chats."""
    rng = random.Random(seed)
    order = list(turns)
    rng.shuffle(order)
    bos = [tokenizer.bos_token_id]
    system = bos + tokenizer(SYSTEM_MESSAGE + " ", add_special_tokens=False)["input_ids"]
    waiting: Turn | None = None
    for turn in order:
        opening = system if rng.random() < config.system_share else bos
        room = config.long_length - len(opening) - len(turn.prompt_ids) - len(turn.response_ids)
        if room < 0:
            opening = bos
        if waiting is not None and room >= len(waiting.prompt_ids) + len(waiting.response_ids):
            yield _chat([waiting, turn], opening, config)
            waiting = None
        elif waiting is None and rng.random() < config.two_turn_share / 2:
            waiting = turn
        else:
            yield _chat([turn], opening, config)


def pack_epoch(
    turns: Sequence[Turn], tokenizer: PreTrainedTokenizerFast, config: CorpusConfig, seed: int
) -> tuple[Packed, Packed]:
    """Pack one pass over the turns into short and long sequences; no chat is cut."""
    rng = random.Random(seed + 1)
    short: list[_Chat] = []
    long: list[_Chat] = []
    for chat in _chats(turns, tokenizer, config, seed):
        is_long = len(chat.token_ids) > config.short_length or rng.random() < config.long_share
        (long if is_long else short).append(chat)
    pad = tokenizer.pad_token_id
    return _pack(short, config.short_length, pad), _pack(long, config.long_length, pad)


def _pack(chats: Sequence[_Chat], length: int, pad: int) -> Packed:
    """Pack first-fit into the `NUM_OPEN` newest sequences; the rest is padding of weight 0."""
    rows: list[_Chat] = []
    for chat in chats:
        most = length - len(chat.token_ids)
        row = next((row for row in rows[-NUM_OPEN:] if len(row.token_ids) <= most), None)
        if row is None:
            rows.append(row := _Chat([], []))
        row.token_ids.extend(chat.token_ids)
        row.weights.extend(chat.weights)
    ids = [row.token_ids + [pad] * (length - len(row.token_ids)) for row in rows]
    weights = [row.weights + [0.0] * (length - len(row.weights)) for row in rows]
    return Packed(np.array(ids, dtype=np.int64), np.array(weights, dtype=np.float32))
