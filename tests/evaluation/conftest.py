"""What the tests of the inference commands share: a tiny model, question files, runs in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from evaluation.answers.log import AnswerLog
from evaluation.answers.row import AnswerRow
from evaluation.inference import command as cli
from evaluation.inference import run as running
from model.commands.command_line import run_command
from model.methods import drafter_class
from tests.model.decoded import datastore_file, heads_folder
from tests.random_llama import random_llama

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "data" / "demo" / "model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
QUESTIONS = 6
CONTEXT = 2048
# The keys of Spec-Bench's answers, and those that this project adds.
ROW_KEYS = {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
CHOICE_KEYS = {"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}
OUR_CHOICE_KEYS = {
    *("token_ids", "prompt_tokens", "prefill_time", "decode_time", "cpu_time"),
    *("draft_tokens", "stop_reasons", "drafted", "accepted", "sources", "step_times"),
    "step_nodes",
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with the demo tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_layers=2)


def save_tiny_model(folder: Path, num_layers: int) -> Path:
    """Write a random Llama with the demo tokenizer; return its folder.

    Few tokens ever win and attention is weak, so that texts fall into cycles as real ones do:
    drafts are accepted, and some answers reach the end-of-text token.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": num_layers, "max_position_embeddings": CONTEXT}
    model = random_llama(8192, pad_token_id=0, **sizes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
        winners = torch.zeros(model.config.vocab_size, 1)
        winners[600:630] = 1
        winners[model.config.eos_token_id] = 1
        model.lm_head.weight.mul_(winners)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, folder)
    return folder


@pytest.fixture(scope="session")
def options(tiny_model: Path) -> list[str]:
    """Options of a short run of the tiny model on the first demo questions."""
    short = "--threads 1 --warmup 0 --max-new-tokens 24 --question-end"
    return ["--model-path", str(tiny_model), *short.split(), str(QUESTIONS)]


@pytest.fixture
def few(options: list[str]) -> list[str]:
    """Options of a run over five questions, with few tokens."""
    return [*options, "--question-end", "5", "--max-new-tokens", "12"]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when the weights would load."""

    def load_target(*_: object) -> None:
        pytest.fail("the weights were about to load")

    monkeypatch.setattr(running, "load_target", load_target)


def error_line(method: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail, as the process would; return its one line without "error: "."""
    with pytest.raises(SystemExit) as exit_:
        run_command(lambda _: cli.main(method, options))
    err = capsys.readouterr().err
    assert exit_.value.code == 2, f"exit code 2 expected for {options}; stderr: {err}"
    assert err.startswith("error: "), f"stderr should begin with 'error: ': {err}"
    assert err.endswith("\n"), f"the line should end: {err!r}"
    assert err.count("\n") == 1, f"one line expected on stderr: {err}"
    return err.removeprefix("error: ")


def required_options(method: str, model: Path) -> list[str]:
    """Return the options without which a method cannot run; the model drafts for itself."""
    cls = drafter_class(method)
    config = AutoConfig.from_pretrained(model)
    if cls.drafts_with() == "heads":
        return ["--heads", heads_folder(method, config)]
    if cls.drafts_with() == "datastore":
        return ["--datastore", datastore_file(config.vocab_size)]
    return ["--draft-model", str(model)] if cls.drafts_with() == "draft_model" else []


def run(method: str, options: Iterable[object], answer_file: Path, *more: object) -> int:
    """Run a method's command in this process; return its exit code."""
    given = [*options, *more, "--answer-file", answer_file]
    return cli.main(method, [str(word) for word in given])


@contextmanager
def cut_after(num_rows: int) -> Iterator[None]:
    """Break the run within the context off after as many rows."""
    left = [num_rows]
    append = AnswerLog.append

    def append_some(log: AnswerLog, row: AnswerRow, memory: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        append(log, row, memory)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(AnswerLog, "append", append_some)
        yield


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write a JSONL file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read a JSONL file, every line of it."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_meta(answer_file: Path) -> dict[str, Any]:
    """Read the sidecar of an answer file."""
    return json.loads(answer_file.with_suffix(".meta.json").read_text(encoding="utf-8"))


def figures(rows: Iterable[Mapping[str, Any]], *names: str) -> dict[Any, list[list[Any]]]:
    """Return these keys of every choice, by question: what must repeat when a run does."""
    return {
        row["question_id"]: [[choice[name] for name in names] for choice in row["choices"]]
        for row in rows
    }


def token_ids(file: Path) -> dict[Any, list[list[Any]]]:
    """Return the new tokens of every choice, by question."""
    return figures(read_rows(file), "token_ids")
