"""Tokenizers of GGUF files: what begins and ends a text, where words are split, and what is refused.

Run: pytest tests/model/api/loading/test_gguf_tokenizer.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from model.api.loading import weights
from model.api.loading.weights import read
from tests.model.api.loading.gguf_families import FAMILIES, family_model, write_family

pytestmark = pytest.mark.skipif(
    not hasattr(weights.transformers, "GgufConfig"),
    reason="GGUF files need transformers 5.23 or newer",
)
BOS, EOS = 1, 2
# Of sentencepiece: three special tokens, bytes, and pieces; a space is spelt "▁".
PIECES = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{n:02X}>" for n in range(256)),
        *PIECES,
    ],
    "tokenizer.ggml.scores": [*[0.0] * 263, -1.0, -2.0, -3.0],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
    "tokenizer.ggml.bos_token_id": BOS,
    "tokenizer.ggml.eos_token_id": EOS,
    "tokenizer.ggml.unknown_token_id": 0,
}


@pytest.fixture(scope="module")
def model() -> Any:
    """A model for the files, whose weights are not read here."""
    return family_model(FAMILIES["Llama 3.1"])


def tokenizer_of(folder: Path, model: Any, keys: dict[str, Any], name: str = "Llama 3.1") -> Any:
    """Return the tokenizer of a file with these keys, by their names after `tokenizer.ggml.`, too."""
    words = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return read(
        AutoTokenizer, write_family(folder / "tiny.gguf", FAMILIES[name], model, keys=words)
    )


@pytest.mark.parametrize("keys", [{}, SENTENCEPIECE])
@pytest.mark.parametrize("adds_bos", [None, False, True])
@pytest.mark.parametrize("adds_eos", [None, False, True])
def test_a_text_begins_and_ends_as_the_file_says(
    adds_bos: bool | None, adds_eos: bool | None, keys: Any, model: Any, tmp_path: Path
) -> None:
    words = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    tokenizer = tokenizer_of(tmp_path, model, {**keys, **words})
    ids = tokenizer("a").input_ids
    begins = bool(keys) if adds_bos is None else adds_bos  # as llama.cpp without a key
    assert (ids[0] == BOS, ids[-1] == EOS) == (begins, bool(adds_eos))


@pytest.mark.parametrize("split", ["llama-bpe", "tekken"])
def test_words_of_some_vocabularies_are_never_cut(split: str, model: Any, tmp_path: Path) -> None:
    whole = tokenizer_of(tmp_path, model, {"pre": split, "merges": ["t h"]})
    cut = tokenizer_of(tmp_path, model, {"pre": "qwen2", "merges": ["t h"]})
    word = whole.convert_tokens_to_ids("ea")  # in the vocabulary, but no merge makes it
    assert whole("ea").input_ids == [BOS, word]
    assert len(cut("ea").input_ids) == 2 and cut("ea").input_ids[0] != BOS
    never = tokenizer_of(tmp_path, model, {"pre": split, "add_bos_token": False})
    assert never("ea").input_ids[0] != BOS


def test_digits_are_single_where_the_file_says_so(model: Any, tmp_path: Path) -> None:
    words = {"merges": ["1 2"]}
    base = read(AutoTokenizer, write_family(tmp_path / "a.gguf", FAMILIES["Llama 3.1"], model))
    tokens = [*base.convert_ids_to_tokens(range(len(base) - 1)), "12"]
    for split, count in (("smollm", 3), ("gpt-2", 2)):
        keys = {**words, "pre": split, "tokens": tokens}
        assert len(tokenizer_of(tmp_path, model, keys)("x12").input_ids) == count, split


@pytest.mark.parametrize("name", ["Llama 3.1", "Phi 3"])
@pytest.mark.parametrize(("adds", "pieces"), [(None, "▁ab"), (True, "▁ab"), (False, "ab")])
def test_a_space_is_put_before_a_text_and_after_special_tokens(
    adds: bool | None, pieces: str, name: str, tmp_path: Path
) -> None:
    keys = {**SENTENCEPIECE, "add_space_prefix": adds, "add_bos_token": False}
    tokenizer = tokenizer_of(tmp_path, family_model(FAMILIES[name]), keys, name)
    assert tokenizer.tokenize("ab</s>ab") == [pieces, "</s>", pieces]
    assert tokenizer.decode(tokenizer("ab a").input_ids).strip() == "ab a"


def test_gemma_puts_no_space_unless_its_file_says_so(tmp_path: Path) -> None:
    model = family_model(FAMILIES["Gemma 2"])
    for adds, piece in ((None, "ab"), (False, "ab"), (True, "▁ab")):
        keys = {**SENTENCEPIECE, "add_space_prefix": adds}
        assert tokenizer_of(tmp_path, model, keys, "Gemma 2").tokenize("ab") == [piece]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "default"}, r"tokenizer\.ggml\.pre: got default; allowed: .*gpt-2, .*llama-bpe"),
        ({"pre": "deepseek-llm"}, r"tokenizer\.ggml\.pre: got deepseek-llm; allowed: "),
        ({"model": "rwkv", "pre": None}, r"tokenizer\.ggml\.model: got rwkv; allowed: gpt2, llama"),
        (
            {"suppress_tokens": [1]},
            r"tokenizer\.ggml\.suppress_tokens: got .*; allowed: a file without",
        ),
        (
            {"tokenizer.rwkv.world": "x"},
            r"tokenizer\.rwkv\.world: got x; allowed: a file without this key",
        ),
    ],
)
def test_a_key_that_cannot_be_read_is_refused(
    keys: dict[str, Any], message: str, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_of(tmp_path, model, keys)


def test_keys_of_other_uses_are_allowed(model: Any, tmp_path: Path) -> None:
    keys = {"fim_pre_token_id": 0, "mask_token_id": 0, "tokenizer.chat_template.tool_use": "x"}
    assert tokenizer_of(tmp_path, model, keys)("th").input_ids
