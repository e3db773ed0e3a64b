"""The demo model's recipe: data, loops, and a folder that plain transformers loads."""

from __future__ import annotations

import json
import math
import random
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from model import SpeculativeDecoder
from model.commands.command_line import UserError
from scripts.demo_model import __main__ as recipe
from scripts.demo_model import answers as demo_answers
from scripts.demo_model.corpus import (
    EOS_WEIGHT,
    PACKED,
    TOKENS_PER_STEP,
    ChatTurn,
    encode_turns,
    find_loop,
    is_held_out,
    pack_epoch,
    read_rows,
    train_tokenizer,
)

WORDS = ("the", "a", "cat", "dog", "house", "runs", "sits", "big", "small", "and", "12", "345")
SHAPE = {
    "vocab_size": 320,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_rows(count: int = 400) -> list[tuple[str, str]]:
    """Short random sentences."""
    rng = random.Random(0)

    def sentence(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))

    return [(sentence(3, 12), sentence(3, 30)) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(make_rows(), vocab_size=320)


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"prompt": prompt, "response": response} for prompt, response in make_rows()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(corpus_file: Path, folder: Path, **changes: object) -> list[str]:
    """A training run of a few seconds."""
    LlamaConfig(**SHAPE).save_pretrained(folder / "shape")
    options: dict[str, object] = {
        "corpus": corpus_file,
        "out": folder / "model",
        "config": folder / "shape",
        "tokens": 5000,
    }
    return [f"--{name}={value}" for name, value in (options | changes).items()]


def test_tokenizer_round_trip_and_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Grüße, 1234!\n\n  x = [5]\t→ end"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer("cat")["input_ids"][0] == tokenizer.bos_token_id
    assert len(tokenizer) <= 320 and len(tokenizer.tokenize("1234")) == 4
    messages = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "the dog"},
        {"role": "user", "content": "a house"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<s>USER: the cat ASSISTANT: the dog</s>USER: a house ASSISTANT:"
    system = [{"role": "system", "content": "Be kind."}, messages[0]]
    rendered = tokenizer.apply_chat_template(system, tokenize=False)
    assert rendered == "<s>Be kind. USER: the cat "


def test_training_text_equals_the_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    row = ("the cat", "sees 12 dogs.")
    ((text,),) = pack_epoch(encode_turns([row], tokenizer), tokenizer.bos_token_id, seed=0)
    chat = [{"role": "user", "content": row[0]}, {"role": "assistant", "content": row[1]}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text.token_ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert len(text.weights) == len(text.token_ids) and text.weights[-1] == EOS_WEIGHT


def test_packing_keeps_every_chat_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = encode_turns(make_rows(), tokenizer)
    turns.append(ChatTurn([5] * 900, [6, tokenizer.eos_token_id]))
    batches = pack_epoch(turns, tokenizer.bos_token_id, seed=3)
    texts = [text for batch in batches for text in batch]
    assert sum(text.token_ids.count(tokenizer.eos_token_id) for text in texts) == len(turns)
    assert sum(text.token_ids.count(tokenizer.bos_token_id) for text in texts) < len(turns)
    assert all(text.token_ids[0] == tokenizer.bos_token_id for text in texts)
    assert all(text.token_ids[-1] == tokenizer.eos_token_id for text in texts)
    assert sum(len(text.token_ids) > PACKED for text in texts) == 1
    sizes = sorted(sum(len(text.token_ids) for text in batch) for batch in batches)
    assert sizes[1] >= TOKENS_PER_STEP and sizes[-1] < 2 * TOKENS_PER_STEP
    assert pack_epoch(turns, tokenizer.bos_token_id, seed=3) == batches
    assert pack_epoch(turns, tokenizer.bos_token_id, seed=4) != batches


def test_rows_that_are_too_long_or_loop_are_not_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [("a", "cat " * 40), ("a", " ".join(f"cat{n}" for n in range(300))), ("a", "cat")]
    assert len(encode_turns(rows, tokenizer)) == 1


def test_held_out_prompts_are_one_in_fifty() -> None:
    assert 0 < sum(is_held_out(prompt) for prompt, _ in make_rows()) < 40


def fast_find_loop(token_ids: list[int]) -> int | None:
    """The place of the first loop, by runs of tokens that equal the one a period before."""
    runs = [0] * 13
    for position, token in enumerate(token_ids):
        for period in range(1, 13):
            is_repeat = position >= period and token_ids[position - period] == token
            runs[period] = runs[period] + 1 if is_repeat else 0
            if runs[period] >= 24 - period:
                return position + 1
    return None


def test_find_loop_equals_another_way_to_find_it() -> None:
    rng = random.Random(1)
    found = 0
    for _ in range(200):
        start = [rng.randrange(9) for _ in range(rng.randrange(20))]
        unit = [rng.randrange(9) for _ in range(rng.randint(1, 14))]
        repeats = rng.randint(1, 8)
        text = [*start, *(unit * repeats), *start]
        loop = find_loop(text)
        assert loop == fast_find_loop(text)
        found += loop is not None
    assert 20 < found < 180


def test_the_loss_falls_and_the_learning_rate_with_it(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    optimizers = recipe.optimizers_of(model)
    batches = cycle(pack_epoch(encode_turns(make_rows(100), tokenizer), 1, seed=0))
    losses = recipe.train(model, optimizers, ([batch[0]] for batch in batches), steps=110)
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] / 2
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.0, 0.0]


def test_written_folder_loads(
    corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    run = arguments(corpus_file, tmp_path)
    assert recipe.main(run) == 0
    assert 0 < float(capsys.readouterr().out.split(" nats")[0].split()[-1]) < 7
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "token_type_ids" not in AutoTokenizer.from_pretrained(folder)("cat")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generate(torch.tensor([[1, 5]]), max_new_tokens=4).shape[1] <= 6
    with pytest.raises(UserError, match="which holds a model; give a new folder"):
        recipe.main(run)


def test_a_model_with_recurrent_states_is_trained_and_drafted_for(
    corpus_file: Path, tmp_path: Path
) -> None:
    if not hasattr(transformers, "Qwen3_5TextConfig"):
        with pytest.raises(UserError, match="qwen3_5"):
            recipe.main(arguments(corpus_file, tmp_path, config="data/demo/hybrid-model"))
        return
    config = transformers.Qwen3_5TextConfig(
        **SHAPE | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    config.save_pretrained(tmp_path / "recurrent")
    assert recipe.main(arguments(corpus_file, tmp_path, config=tmp_path / "recurrent")) == 0
    decoder = SpeculativeDecoder.from_pretrained(
        str(tmp_path / "model"), method="recycling", dtype=torch.float32
    )
    kinds = decoder.target.config.layer_types
    assert kinds == ["linear_attention"] * 3 + ["full_attention"]
    assert len(decoder.target.mixers._modules) == 3
    ids = torch.tensor([[1, 5, 6, 7]])
    expected = decoder.target.model.generate(ids, max_new_tokens=20, do_sample=False)
    assert decoder.generate(ids, max_new_tokens=20).token_ids == expected[0, 4:].tolist()


class Parrot:
    """Repeats what it is asked; ends its answers but those to prompts with a 3."""

    def generate_all(self, prompts: list[Any], **_: object) -> list[SimpleNamespace]:
        texts = [messages[0]["content"] for messages in prompts]
        reasons = ["length" if "3" in text else "eos" for text in texts]
        return [
            SimpleNamespace(text=f" {text}", stop_reason=reason)
            for text, reason in zip(texts, reasons, strict=True)
        ]


def test_answers_that_end_become_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, file, out = ["cat", "3 dogs", "a house", "runs"], tmp_path / "in", tmp_path / "out"
    rows = [{"prompt": prompt, "response": "-"} for prompt in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(demo_answers, "check_model", lambda _: None)
    monkeypatch.setattr(demo_answers, "load_decoder", lambda *_: Parrot())
    assert demo_answers.main(["--corpus", str(file), "--out", str(out)]) == 0
    assert read_rows(out) == [(prompt, prompt) for prompt in ("cat", "runs", "a house")]


def test_a_model_answers_the_prompts_of_a_corpus(corpus_file: Path, tmp_path: Path) -> None:
    assert recipe.main(arguments(corpus_file, tmp_path)) == 0
    out = tmp_path / "answers.jsonl"
    options = [
        "--model",
        str(tmp_path / "model"),
        "--dtype",
        "float32",
        "--corpus",
        str(corpus_file),
        "--out",
        str(out),
    ]
    assert demo_answers.main([*options, "--max-new-tokens", "40", "--num-prompts", "50"]) == 0
    asked = {prompt for prompt, _ in make_rows()}
    assert {json.loads(line)["prompt"] for line in out.read_text().splitlines()} <= asked
    with pytest.raises(UserError, match=r"out: got nowhere/answers\.jsonl; allowed"):
        demo_answers.main([*options[:6], "--out", "nowhere/answers.jsonl"])
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        demo_answers.main([*options[:4], "--corpus", "missing.jsonl", *options[6:]])
    with pytest.raises(UserError, match="none"):
        demo_answers.main(["--model-path", str(tmp_path / "none"), *options[2:]])


def test_a_given_tokenizer_is_kept(corpus_file: Path, tmp_path: Path) -> None:
    given, tokenizer = tmp_path / "given", train_tokenizer(make_rows(), 310)
    tokenizer.save_pretrained(given)
    size = len(tokenizer)
    assert recipe.main(arguments(corpus_file, tmp_path, tokenizer=given)) == 0
    written = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert written.get_vocab() == tokenizer.get_vocab()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["vocab_size"] == size


@pytest.mark.parametrize("option", ["tokenizer", "corpus", "config"])
def test_missing_files_are_refused(corpus_file: Path, tmp_path: Path, option: str) -> None:
    with pytest.raises(UserError, match="missing"):
        recipe.main(arguments(corpus_file, tmp_path, **{option: tmp_path / "missing"}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n', r"corpus corpus\.jsonl: got .*response"),
        ("no JSON\n", r"corpus corpus\.jsonl: got .*; allowed: JSON objects"),
        ('{"prompt": "a", "response": "b"}\n', "got no row"),
    ],
)
def test_a_bad_corpus_is_refused(
    corpus_file: Path, tmp_path: Path, text: str, message: str
) -> None:
    corpus_file.write_text(text)
    with pytest.raises(UserError, match=message):
        recipe.main(arguments(corpus_file, tmp_path))
