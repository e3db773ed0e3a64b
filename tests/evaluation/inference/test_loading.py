"""Models of strangers: safetensors only, no code of their own, unless they are trusted; and models whose
layers lie apart.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from model.backends.proofs.self_test import self_test
from model.backends.target import TargetModel
from model.commands import loading
from model.commands.command_line import UserError
from model.commands.loading import load_config_and_tokenizer
from model.commands.model_options import ModelOptions
from model.engine.loop import generate
from model.methods import drafter_class
from tests.evaluation.conftest import ROOT, error_line, run, token_ids


@pytest.fixture
def pickled(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with its weights in a pickle."""
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_model, folder)
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    return folder


@pytest.mark.usefixtures("no_weights")
def test_pickled_weights_are_refused_before_they_are_read(
    pickled: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line("vanilla", [*options, "--model-path", str(pickled)], capsys)
    assert "pytorch_model.bin" in line and "--allow-pickle" in line


def test_pickled_weights_that_are_allowed_give_the_same_answers(
    pickled: Path, options: list[str], tmp_path: Path
) -> None:
    safe, trusted = tmp_path / "safe.jsonl", tmp_path / "trusted.jsonl"
    run("vanilla", options, safe, "--question-end", 2)
    more = ["--model-path", pickled, "--allow-pickle", "--question-end", 2]
    assert run("vanilla", options, trusted, *more) == 0
    assert token_ids(trusted) == token_ids(safe)


@pytest.fixture
def hub_cache(pickled: Path, tmp_path: Path) -> dict[str, str]:
    """Variables of a machine without network whose hub cache has the pickled model as org/pickled."""
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--org--pickled"
    shutil.copytree(pickled, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize(("more", "code"), [([], 2), (["--allow-pickle"], 0)])
def test_a_hub_name_with_pickles_alone_is_refused_in_one_line_unless_allowed(
    more: list[str], code: int, hub_cache: dict[str, str], options: list[str], tmp_path: Path
) -> None:
    answers = ["--answer-file", str(tmp_path / "answers.jsonl"), "--question-end", "1"]
    given = [*options, "--model-path", "org/pickled", *answers, *more]
    command = [sys.executable, "-m", "evaluation.inference_vanilla", *given]
    done = subprocess.run(command, cwd=ROOT, env=hub_cache, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.startswith("error: model_path org/pickled: has its weights in pytorch_")
        assert "--allow-pickle" in done.stderr and done.stderr.count("\n") == 1


def test_a_hub_name_with_safetensors_beside_its_pickles_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"model.safetensors.index.json", "pytorch_model.bin"}
    monkeypatch.setattr(loading, "has_file", lambda _, file: file in there)
    loading._refuse_pickles_of_hub("org/name")
    there.remove("model.safetensors.index.json")
    with pytest.raises(
        UserError, match=r"org/name: has its weights in pytorch_model.bin, a pickle"
    ):
        loading._refuse_pickles_of_hub("org/name")


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._mark,)


def test_a_pickle_that_runs_code_does_not_run_it_even_when_allowed(
    pickled: Path, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    torch.save({"model.norm.weight": Attack(mark)}, pickled / "pytorch_model.bin")
    given = [*options, "--model-path", str(pickled), "--allow-pickle"]
    line = error_line("vanilla", [*given, "--answer-file", str(tmp_path / "a.jsonl")], capsys)
    assert "its pickle refers to code other than tensors" in line
    assert not mark.exists(), "code of a stranger ran"
    torch.load(pickled / "pytorch_model.bin", weights_only=False)
    assert mark.exists(), "the attack above would not work"


@pytest.mark.usefixtures("no_weights")
def test_code_that_comes_with_a_model_runs_only_when_it_is_trusted(
    tiny_model: Path, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, mark = tmp_path / "own_code", tmp_path / "mark"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "stranger", "auto_map": {"AutoConfig": "stranger.StrangerConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [
        "import os",
        "from transformers import LlamaConfig",
        f"os.makedirs({str(mark)!r}, exist_ok=True)",
        "class StrangerConfig(LlamaConfig):",
        "    model_type = 'stranger'",
    ]
    (folder / "stranger.py").write_text("\n".join(lines))
    line = error_line("vanilla", [*options, "--model-path", str(folder)], capsys)
    assert "--trust-remote-code" in line
    assert not mark.exists(), "code of a stranger ran"
    error_line("vanilla", [*options, "--model-path", str(folder), "--trust-remote-code"], capsys)
    assert mark.exists(), "the option does nothing"


def test_several_gpus_without_accelerate_are_refused(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda _: None)
    monkeypatch.setattr(loading.torch, "zeros", lambda *_, **__: torch.empty(1))  # no GPU here
    model_options = ModelOptions(num_gpus_per_model=2, device="cuda")
    with pytest.raises(UserError, match="pip install accelerate"):
        loading.choose_device(model_options)


@pytest.mark.parametrize("method", ["recycling", "lookahead"])
def test_layers_that_lie_apart_give_the_same_tokens(
    method: str, tiny_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="layers are placed by accelerate")
    places: dict[str, Any] = {
        **dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.rotary_emb"), "cpu"),
        **dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), "disk"),
    }
    whole = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    apart = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32, device_map=places, offload_folder=tmp_path / "weights"
    ).eval()
    assert {str(part.device) for part in apart.parameters()} == {"cpu", "meta"}
    cls = drafter_class(method)
    answers = []
    for model in (whole, apart):
        target = TargetModel(model)
        self_test(target)
        drafter = cls(cls.config_class(), target.vocab_size, target.device)
        answers.append(generate(target, drafter, [1, 600, 610, 600], max_new_tokens=24))
    assert answers[1].token_ids == answers[0].token_ids
    assert answers[1].accept_lengths == answers[0].accept_lengths
    assert max(answers[0].accept_lengths) > 1, "no draft was accepted"


def test_the_demo_model_needs_no_trust() -> None:
    config, _ = load_config_and_tokenizer(ModelOptions().model_path)
    assert config.model_type == "llama"
