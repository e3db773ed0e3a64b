"""Training of heads: its text, its losses, and going on where it stopped.

Run: pytest tests/scripts/train_heads/test_train_heads.py
"""

from __future__ import annotations

import argparse
import gzip
import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

from model.backends.target import TargetModel
from model.commands.command_line import UserError
from model.commands.model_options import DEMO_MODEL
from model.methods import find_method
from scripts.train_heads import training
from scripts.train_heads.__main__ import TRAINERS, main
from scripts.train_heads.data import (
    Document,
    TrainingBatch,
    batches_of_epoch,
    collate,
    read_documents,
)
from tests.random_llama import random_llama

SIZE, VOCAB = 32, 60


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The demo model's tokenizer."""
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """Some rows to learn from."""
    file = tmp_path / "answers.jsonl"
    rows = [
        {"prompt": f"Count from {start}.", "response": " ".join(map(str, range(start, start + 9)))}
        for start in range(40)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def tiny(seed: int = 0) -> LlamaForCausalLM:
    """Return a random frozen model."""
    sizes = {"hidden_size": SIZE, "num_hidden_layers": 1, "num_attention_heads": 2}
    return random_llama(VOCAB, seed, initializer_range=0.02, **sizes).requires_grad_(False)


def options(**changed: Any) -> argparse.Namespace:
    """Return options of a trainer."""
    return argparse.Namespace(
        **{"model_path": "tiny", "num_heads": 3, "num_layers": 1, "own_outputs": True, **changed}
    )


def test_of_a_prompt_with_its_response_the_response_is_learned(
    answers: Path, tokenizer: Any
) -> None:
    first = read_documents([answers], tokenizer, 100)[0]
    assert tokenizer.decode(first.token_ids[: first.begin]) == "<s>USER: Count from 0. ASSISTANT:"
    assert tokenizer.decode(first.token_ids[first.begin :]) == " 0 1 2 3 4 5 6 7 8</s>"


def test_plain_text_is_learned_in_parts(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "text.txt.gz"
    file.write_bytes(gzip.compress(b"the sea and the moon " * 40))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "the sea and the moon"}) + "\n")
    documents = read_documents([file, rows], tokenizer, 32)
    whole = tokenizer("the sea and the moon " * 40).input_ids
    assert [token for each in documents[:-1] for token in each.token_ids] == whole
    assert max(len(each.token_ids) for each in documents) == 32
    assert documents[-1] == Document(tokenizer("the sea and the moon").input_ids, 0)
    assert {each.begin for each in documents} == {0}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "rows.jsonl line 1: is not JSON"),
        ('{"prompt": 3, "response": "x"}', "line 1: allowed: an object with prompt and response"),
        ("[]", "line 1: allowed: an object"),
        ("", "got nothing to learn"),
    ],
)
def test_text_that_cannot_be_used_is_one_line(
    content: str, says: str, tmp_path: Path, tokenizer: Any
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=says) as error:
        read_documents([file], tokenizer, 100)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="text: cannot read"):
        read_documents([tmp_path / "nowhere.txt"], tokenizer, 100)


def test_an_epoch_has_every_document_once_in_batches_that_fit() -> None:
    documents = [Document([1] * (4 + place % 30), 0) for place in range(1100)]
    batches = batches_of_epoch(documents, 256, seed=1, epoch=0)
    assert sorted(at for batch in batches for at in batch) == list(range(1100))
    longest = [max(len(documents[at].token_ids) for at in batch) * len(batch) for batch in batches]
    assert max(longest) <= 256
    assert batches == batches_of_epoch(documents, 256, seed=1, epoch=0)
    assert batches != batches_of_epoch(documents, 256, seed=1, epoch=1)


def test_padding_and_prompts_are_not_learned() -> None:
    documents = [Document([5, 6, 7, 8], 2), Document([9, 10], 0)]
    batch = collate(documents, torch.device("cpu"))
    assert batch.token_ids.tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    assert batch.is_learned.tolist() == [[False, False, True, True], [True, True, False, False]]


def random_batch() -> tuple[TrainingBatch, torch.Tensor]:
    torch.manual_seed(3)
    token_ids = torch.randint(VOCAB, (2, 9))
    is_learned = torch.ones(2, 9, dtype=torch.bool)
    is_learned[0, :4] = False
    is_learned[1, 7:] = False
    return TrainingBatch(token_ids, is_learned), torch.randn(2, 9, SIZE)


def test_medusas_head_k_learns_the_token_k_places_after_the_next() -> None:
    model = tiny()
    trainer = TRAINERS["medusa"](model, options(num_layers=2))
    batch, hidden = random_batch()
    heads: Any = trainer.module
    with torch.no_grad():
        for head in heads:
            head[0].linear.weight.normal_()
    expected = 0.0
    for index, head in enumerate(heads):
        rows, wanted = [], []
        for text in range(2):
            for place in range(9 - (2 + index)):
                if batch.is_learned[text, place + 2 + index]:
                    rows.append(head(hidden[text, place]))
                    wanted.append(int(batch.token_ids[text, place + 2 + index]))
        loss = F.cross_entropy(torch.stack(rows), torch.tensor(wanted))
        expected += 0.8 ** (index + 1) * loss.item()
    found = trainer.loss(batch, hidden)
    assert found.total.item() == pytest.approx(expected, rel=1e-4)
    assert set(found.figures) == {
        f"{kind}_{head}" for kind in ("loss", "top1") for head in (1, 2, 3)
    }


# Draft networks learn from a text and not from noise: test_train_eagle.
@pytest.mark.parametrize("method", ["medusa", "hydra"])
@pytest.mark.parametrize("own_outputs", [True, False])
def test_what_is_trained_is_drafted_with(method: str, own_outputs: bool, tmp_path: Path) -> None:
    model = tiny()
    trainer = TRAINERS[method](model, options(own_outputs=own_outputs))
    batch, hidden = random_batch()
    optimizer = torch.optim.Adam(trainer.module.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = trainer.loss(batch, hidden)
        loss.total.backward()
        optimizer.step()
        losses.append(loss.total.item())
    assert losses[-1] < 0.85 * losses[0]
    assert all(parameter.grad is None for parameter in model.parameters()), "the model is frozen"
    trainer.save(tmp_path)
    drafter_class = find_method(method).drafter_class
    config = drafter_class.config_class(heads=str(tmp_path))
    drafter = drafter_class(config, VOCAB, torch.device("cpu"))
    drafter.check_target(TargetModel(model))


def train(answers: Path, out: Path, *more: str) -> int:
    given = ["--method", "medusa", "--text", str(answers), "--out", str(out), "--num-heads", "2"]
    small = ["--no-own-outputs", "--batch-tokens", "128", "--save-minutes", "0.001"]
    return main([*given, *small, *more])


def test_a_training_goes_on_where_it_stopped(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, num_steps = tmp_path / "heads", 0
    step = training.Run._step
    # A clock by which each step takes a quarter of a second, so that 3 s are 12 steps.
    quarters = count()
    clock = SimpleNamespace(monotonic=lambda: next(quarters) / 4)
    monkeypatch.setattr(training, "time", clock)

    def breaking(run: training.Run) -> None:
        nonlocal num_steps
        step(run)
        num_steps += 1
        if num_steps == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.Run, "_step", breaking)
    with pytest.raises(KeyboardInterrupt):
        train(answers, out, "--minutes", "0.05")
    state = torch.load(tmp_path / "heads.work/state.pt", weights_only=True)
    assert state["place"]["step"] == 4, "each step is saved, but for the one that broke"
    assert train(answers, out, "--minutes", "0.05") == 0
    after = torch.load(tmp_path / "heads.work/state.pt", weights_only=True)
    assert after["place"]["step"] == state["place"]["step"] + num_steps - 5 == 12
    assert after["place"]["seconds"] == 3.0
    assert {file.name for file in out.iterdir()} >= {"config.json", "medusa_lm_head.safetensors"}
    with pytest.raises(UserError, match=r"num_layers: got 2; the training in .* has 1; give that"):
        train(answers, out, "--minutes", "0.05", "--num-layers", "2")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (["--method", "nothing"], "method: got 'nothing'|did you mean|allowed"),
        (["--minutes", "0"], "minutes: got 0.0; allowed: above 0"),
        (["--max-length", "2"], "max_length: got 2; allowed: 16 or more"),
        (["--text", "/nowhere.jsonl"], "text: cannot read /nowhere.jsonl"),
        (["--model-path", "/nowhere"], "model_path"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    changed: list[str], says: str, answers: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says) as error:
        train(answers, tmp_path / "heads", *changed)
    assert "\n" not in str(error.value)
