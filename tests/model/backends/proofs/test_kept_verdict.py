"""What one start proved of a model counts at the next, for the same weights and code only.

Run: pytest tests/model/backends/proofs/test_kept_verdict.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from model import SpeculativeDecoder
from model.backends.proofs import self_test as module
from model.backends.proofs.kept_verdict import verdict_key
from model.backends.proofs.self_test import prove
from model.backends.target import TargetModel
from tests.model.decoded import known, random_ids, referee

FAMILY = "Llama, grouped heads"
KEY = f"""
from model.backends.proofs.kept_verdict import verdict_key
from model.backends.passes.weights import Weights
from tests.model.decoded import target_of

target = target_of({FAMILY!r})
print(verdict_key([], target.snapshot.code, Weights.of(target).sums))
"""


@pytest.fixture(autouse=True)
def keeping(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep verdicts in a folder of the test."""
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "verdict_key", verdict_key)
    torch._dynamo.reset()  # what other tests compiled stays in the family's file, as code from elsewhere


def started() -> TargetModel:
    """Return a target of the same model, as another start makes it."""
    return TargetModel(known(FAMILY).build())


def test_a_model_is_tested_at_its_first_start_only(tested: list[TargetModel]) -> None:
    errors = {prove(started()) for _ in range(3)}
    assert len(tested) == 1 and len(errors) == 1
    decoder = SpeculativeDecoder(known(FAMILY).build(), method="recycling")
    assert len(tested) == 1
    prompt = random_ids(12)
    found = decoder.generate(prompt, max_new_tokens=12).token_ids
    assert found == referee(decoder.target, prompt, 12)


def other_number(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-6


def other_setting(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-4


def other_part(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


@pytest.mark.parametrize("change", [other_number, other_setting, other_part])
def test_another_model_is_tested(tested: list[TargetModel], change: Any) -> None:
    prove(started())
    model = known(FAMILY).build()
    change(model)
    prove(TargetModel(model))
    assert len(tested) == 2


@pytest.mark.parametrize(
    "dress",
    [
        lambda new, own: new,
        lambda new, own: wraps(own)(new),
        lambda new, own: partial(new),
        lambda new, own: torch.no_grad()(wraps(own)(new)),
        lambda new, own: lru_cache(0)(wraps(own)(new)),
    ],
    ids=["plain", "as the original", "partial", "within one of torch", "within one of Python"],
)
def test_code_from_elsewhere_is_tested_at_every_start(
    tested: list[TargetModel], monkeypatch: pytest.MonkeyPatch, dress: Callable[..., Any]
) -> None:
    own = modeling_llama.apply_rotary_pos_emb
    patched = dress(lambda *arguments, **options: own(*arguments, **options), own)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", patched)
    prove(started())
    prove(started())
    assert len(tested) == 2


def test_what_was_found_is_found_again_and_said(
    tested: list[TargetModel],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prove(started())
    (file,) = tmp_path.glob("proof-*.json")
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"chain_reason": "why", "use_kernels": False}))
    target = started()
    prove(target)
    assert len(tested) == 1
    assert target.chain_reason == "why" and not target.use_kernels
    assert "chain drafts only: why" in caplog.text and "kernels are off" in caplog.text


@pytest.mark.parametrize("content", ["", "[]", '{"error": 0.0}', '{"error": "small"}'])
def test_a_file_that_cannot_be_read_is_no_verdict(
    tested: list[TargetModel], tmp_path: Path, content: str
) -> None:
    prove(started())
    (file,) = tmp_path.glob("proof-*.json")
    file.write_text(content)
    prove(started())
    assert len(tested) == 2 and json.loads(file.read_text())["error"] < 1e-3


def test_the_key_is_the_same_in_every_process() -> None:
    first, second = (
        subprocess.run(
            [sys.executable, "-c", KEY],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in "12"
    )
    assert first == second and len(first) == 32
