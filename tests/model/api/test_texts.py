"""Streamed text: pieces never split a character, and joined they are the whole text.

Run: pytest tests/model/api/test_texts.py
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from model.api.texts import REPLACEMENT, TextStream

DEMO = Path(__file__).resolve().parents[3] / "data/demo/model"
TEXT = "Naïve café — 日本語のテキスト, 👩‍🚀 and 🏳️‍🌈! Здравствуй, мир. \t x² ≤ √2 …\n\nend 😀😀"


def byte_fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer with byte fallback and its own treatment of spaces."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "c"]
    model = models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def in_pieces(tokenizer: Any, ids: list[int], seed: int) -> list[str]:
    """Return the pieces of a text whose tokens come in steps of one to five."""
    draws = random.Random(seed)
    stream, pieces, begin = TextStream(tokenizer), [], 0
    while begin < len(ids):
        end = begin + draws.randint(1, 5)
        pieces.append(stream.add(ids[begin:end], is_last=end >= len(ids)))
        begin = end
    return pieces


@pytest.mark.parametrize("seed", range(10))
def test_pieces_are_the_text_and_whole_characters(seed: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    cuts = (tokenizer.decode(ids[:length]) for length in range(len(ids)))
    assert any(text.endswith(REPLACEMENT) for text in cuts), "no token ends inside a character"
    pieces = in_pieces(tokenizer, [1, *ids, 2], seed)
    assert "".join(pieces) == TEXT
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 10


@pytest.mark.parametrize("seed", range(10))
def test_characters_spelt_in_bytes_are_whole(seed: int) -> None:
    tokenizer = byte_fallback()
    ids = [258]
    for character in "😀é":
        ids += [1 + byte for byte in character.encode()]
    ids += [257, 259, 1 + 0xC3, 1 + 0xA9, 260]
    pieces = in_pieces(tokenizer, ids, seed)
    assert "".join(pieces) == tokenizer.decode(ids) == " a😀é bé" + "c"
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(12))
def test_pieces_are_the_text_wherever_bytes_are_cut(seed: int) -> None:
    """A text that ends inside a character, or has bytes that are none; a special token among them."""
    tokenizer = byte_fallback()
    draws = random.Random(seed)
    spelt = [1 + byte for byte in "é😀日".encode()]
    ids = [258, *spelt[: draws.randint(3, len(spelt) - 1)]]
    if seed % 2:
        ids += [draws.choice([0, 259, 1 + 0x80, 1 + 0xE2]) for _ in range(5)]
    pieces = in_pieces(tokenizer, ids, seed)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_what_is_no_character_comes_at_the_end() -> None:
    tokenizer = byte_fallback()
    stream = TextStream(tokenizer)
    assert stream.add([259]) == "b"
    assert stream.add([1 + 0xF0]) == ""
    assert stream.add([1 + 0x9F]) == ""
    assert stream.add([], is_last=True) == REPLACEMENT * 2
    broken = TextStream(tokenizer)
    assert broken.add([1 + 0xF0]) == ""
    assert broken.add([260]) == REPLACEMENT + "c"


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids = tokenizer("the sea, the sun", add_special_tokens=False).input_ids
    stream = TextStream(tokenizer, ["sea, the sand", "sun"])
    pieces = [stream.add([token], token is ids[-1]) for token in ids]
    assert "".join(pieces) == "the sea, the " and stream.stop_string == "sun"
    assert "se" not in "".join(pieces[: next(i for i, one in enumerate(pieces) if "," in one)])
    ignoring = TextStream(tokenizer, ["sea"])
    text = "".join(ignoring.add([token], token is ids[-1], may_stop=False) for token in ids)
    assert text == "the sea, the sun" and ignoring.stop_string is None


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert TextStream(None).add([1, 2], is_last=True) == ""
