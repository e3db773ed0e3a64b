"""`--compile`: the same answers, everything compiled before the first question, and what it refuses.

Run: pytest tests/evaluation/inference/test_compiled.py
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from evaluation import compare
from model.commands import loading
from model.commands.command_line import UserError
from model.commands.model_options import ModelOptions
from model.compiled.target import CompiledTarget
from tests.evaluation.conftest import read_meta, run, save_tiny_model, token_ids

OPTIONS = ("--threads", 1, "--max-new-tokens", 16, "--question-end", 2)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, since every shape traces each layer anew."""
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_layers=1)


@pytest.fixture(autouse=True)
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace steps without turning them into other code."""

    def quick(model: PreTrainedModel, **options: Any) -> CompiledTarget:
        return CompiledTarget(model, backend="eager", **options)

    torch._dynamo.reset()
    monkeypatch.setattr(loading, "CompiledTarget", quick)


def test_compiled_answers_are_those_of_a_run_without(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--model-path", tiny_model, *OPTIONS, "--tree-version", "2.2.2"]
    plain, compiled = tmp_path / "plain.jsonl", tmp_path / "compiled.jsonl"
    with caplog.at_level(logging.WARNING):
        assert run("recycling", options, plain, "--warmup", 1) == 0
        assert run("recycling", options, compiled, "--warmup", 1, "--compile") == 0
        assert "were compiled within an answer" not in caplog.text
        assert token_ids(compiled) == token_ids(plain)
        assert [read_meta(file)["compile"] for file in (plain, compiled)] == [False, True]
        late = tmp_path / "late.jsonl"
        one = ("--warmup", 0, "--question-end", 1)
        assert run("recycling", options, late, *one, "--compile") == 0
        assert "shapes were compiled within an answer" in caplog.text


def test_shapes_of_a_warm_up_beside_others_are_within_no_answer(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    methods = ("--methods", "vanilla", "recycling --tree-version 2.2.2")
    options = ["--model-path", tiny_model, *OPTIONS, "--compile", "--warmup", 1, *methods]
    with caplog.at_level(logging.WARNING):
        assert compare.main([*map(str, options), "--out", str(tmp_path)]) == 0
    assert "were compiled within an answer" not in caplog.text


def test_compile_needs_a_model_on_one_gpu() -> None:
    with pytest.raises(
        ValueError, match="compile: got it with num_gpus_per_model 2; allowed: with 1"
    ):
        ModelOptions(compile=True, num_gpus_per_model=2)


def test_a_model_without_tree_masks_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    model_options = ModelOptions(model_path=str(tiny_model), compile=True)
    monkeypatch.setattr(
        "model.engine.target.why_chain_only", lambda model: "its positions are its own"
    )
    with pytest.raises(UserError, match=r"own .*--compile; leave it"):
        loading.load_target(model_options, loading.check_model(model_options))
