"""A model as Vicuna-7B-v1.3 is on the hub: its tokenizer a sentencepiece model alone, its weights pickles.

Run: pytest tests/evaluation/inference/test_sentencepiece.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import LlamaConfig

from model.commands import loading
from model.commands.command_line import UserError
from model.commands.loading import load_config_and_tokenizer
from tests.evaluation.conftest import ROOT, read_meta, run, token_ids
from tests.random_llama import random_llama

VOCAB = 600
TEXTS = (
    "Hello world",
    "two  spaces, 12345",
    "a\nb\n\n  c",
    "naïve 日本 😀",
    "A chat. USER: Hi ASSISTANT:",
)


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer's files, learned from the README, with settings as Vicuna's."""
    folder = tmp_path_factory.mktemp("tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        input=str(ROOT / "README.md"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=VOCAB,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {
        **{name: {"__type": "AddedToken", "content": text} | flags for name, text in names.items()},
        **{"add_bos_token": True, "add_eos_token": False, "pad_token": None, "sp_model_kwargs": {}},
        **{"clean_up_tokenization_spaces": False, "tokenizer_class": "LlamaTokenizer"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps(names | {"pad_token": "<unk>"}))
    return folder


@pytest.fixture(params=["one file", "shards"])
def vicuna(request: pytest.FixtureRequest, tokenizer_files: Path, tmp_path: Path) -> Path:
    """A folder with a random model and such a tokenizer."""
    folder = tmp_path / "vicuna-tiny"
    folder.mkdir()
    for file in tokenizer_files.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model = random_llama(VOCAB, intermediate_size=64)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    weights = model.half().state_dict()
    if request.param == "one file":
        torch.save(weights, folder / "pytorch_model.bin")
        return folder
    place = {}
    for number in (1, 2):
        name = f"pytorch_model-0000{number}-of-00002.bin"
        part = dict(list(weights.items())[number - 1 :: 2])
        torch.save(part, folder / name)
        place |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": place}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def test_it_answers_with_pickles_allowed(vicuna: Path, tmp_path: Path) -> None:
    assert not list(vicuna.glob("*.safetensors")) and not (vicuna / "tokenizer.json").exists()
    short = "--threads 1 --warmup 0 --max-new-tokens 12 --question-end 2 --allow-pickle"
    options = ["--model-path", vicuna, *short.split()]
    answers = {}
    for method in ("vanilla", "recycling"):
        file = tmp_path / f"{method}.jsonl"
        assert run(method, options, file) == 0
        assert read_meta(file)["conv_template"] == "vicuna_v1.1"
        answers[method] = token_ids(file)
    assert answers["recycling"] == answers["vanilla"]
    assert any(turn for turns in answers["vanilla"].values() for turn in turns[0])


def test_texts_have_the_tokens_of_sentencepiece(tokenizer_files: Path) -> None:
    LlamaConfig(vocab_size=VOCAB).save_pretrained(tokenizer_files)
    _, tokenizer = load_config_and_tokenizer(str(tokenizer_files))
    pieces = sentencepiece.SentencePieceProcessor(str(tokenizer_files / "tokenizer.model"))
    for text in TEXTS:
        assert tokenizer(text).input_ids == [pieces.bos_id(), *pieces.encode(text)], text


@pytest.mark.parametrize("legacy", [None, True, False])
def test_a_chat_goes_on_with_the_tokens_of_a_words_beginning_unless_the_settings_say_not(
    legacy: bool | None, tokenizer_files: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "settings"
    shutil.copytree(tokenizer_files, folder)
    LlamaConfig(vocab_size=VOCAB).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    words = {} if legacy is None else {"legacy": legacy}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | words))
    _, tokenizer = load_config_and_tokenizer(str(folder))
    pieces = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    turns = ("USER: Hi ASSISTANT: Hello", "USER: More ASSISTANT:")
    first, second = map(pieces.encode, turns)
    expected = [pieces.bos_id(), *first, pieces.eos_id(), *second]
    assert (tokenizer("</s>".join(turns)).input_ids == expected) == (legacy is not False)


def test_a_package_that_the_tokenizer_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise ValueError("Error parsing line b'\\x0e' in folder/tokenizer.model")

    monkeypatch.setattr(loading, "read", read)
    monkeypatch.setattr(loading, "installed_version", {"sentencepiece": "1"}.get)
    with pytest.raises(UserError, match=r"tokenizer.model; pip install protobuf$"):
        load_config_and_tokenizer("org/name")
