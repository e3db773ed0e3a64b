"""The self-test shortens the windows of a copy: nobody else sees it, and the copy holds no weights.

Run: pytest tests/model/backends/proofs/test_short_windows.py
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch

from model.backends.proofs import self_test as module
from model.backends.proofs.plain_decoding import SHORT_WINDOW, structural_copy, with_short_windows
from model.backends.proofs.self_test import self_test
from model.backends.proofs.support import UnsupportedModelError
from model.backends.target import TargetModel
from tests.model.api.test_threads import beside, plain
from tests.model.decoded import random_ids
from tests.model.families.family import Family

KINDS = {
    "MistralConfig": {"sliding_window": 12},
    "Gemma2Config": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
}


def built(config: str) -> Any:
    options = {**KINDS[config], "initializer_range": 0.3, "eos_token_id": None}
    return Family("a model with windows", config, options).build()


@pytest.mark.parametrize("config", KINDS)
def test_plain_generation_beside_self_tests_keeps_its_windows(config: str) -> None:
    model = built(config)
    prompt = random_ids(30)
    expected = plain(model, prompt)
    model.config.sliding_window = SHORT_WINDOW
    assert plain(model, prompt) != expected, "the window has no effect here"
    model.config.sliding_window = 12

    def generate() -> None:
        assert plain(model, prompt) == expected, "the windows changed"

    with beside(generate) as rounds:
        while len(rounds) < 8:
            target = TargetModel(model)
            self_test(target)
            assert not target.chain_only


def test_the_copy_has_the_tensors_and_a_config_of_its_own() -> None:
    model = built("Gemma2Config")
    layers = model.model.layers
    layers[0].mlp.forward = MethodType(type(layers[0].mlp).forward, layers[0].mlp)
    layers[1].mlp.forward = partial(type(layers[1].mlp).forward, layers[1].mlp)
    layers[1].mlp.table = torch.ones(3)  # neither a parameter nor a buffer
    target = TargetModel(model)
    copied = with_short_windows(target).model
    assert copied is not model
    assert copied.config.sliding_window == SHORT_WINDOW and model.config.sliding_window == 12
    pairs = [
        *zip(copied.parameters(), model.parameters(), strict=True),
        *zip(copied.buffers(), model.buffers(), strict=True),
    ]
    assert all(one is other for one, other in pairs)
    new = copied.model.layers
    assert new[1].mlp.table is layers[1].mlp.table
    assert new[0].self_attn.config is copied.config
    assert new[0].mlp.forward.__self__ is new[0].mlp
    assert new[1].mlp.forward.args == (new[1].mlp,)
    self_test(target)
    assert not target.chain_only


def test_a_model_that_sees_later_tokens_within_its_window_is_refused() -> None:
    options = {"sliding_window": 8, "initializer_range": 0.3, "pad_token_id": 0}
    model = Family("short windows", "Phi3Config", options).build()
    attention = model.model.layers[0].self_attn
    target, prompt = TargetModel(model), random_ids(7)
    expected = plain(model, prompt)
    attention.is_causal = False
    assert plain(model, prompt) != expected, "a prompt within the window does not show it"
    for check in (target.check_model, lambda: TargetModel(model)):
        with pytest.raises(UnsupportedModelError, match=r"attention of layers\.0\.self_attn"):
            check()
    attention.is_causal = True
    target.check_model()


def test_functions_that_use_the_original_leave_the_windows_as_they_are() -> None:
    model = built("MistralConfig")
    own = model.model.forward
    model.model.forward = lambda *arguments, **options: own(*arguments, **options)
    with pytest.raises(
        ValueError, match="functions were set on its modules, and would use the originals"
    ):
        structural_copy(model)
    target = TargetModel(model)
    assert with_short_windows(target) is target
    self_test(target)
    assert not target.chain_only and model.config.sliding_window == 12


def test_what_is_found_of_the_copy_is_set_on_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(target: TargetModel, prefix_length: int) -> float:
        target.chain_reason = "no trees"
        target.is_same_in_parts = False
        target.switch_kernels(False)
        return 0.0

    monkeypatch.setattr(module, "_tested", found)
    target = TargetModel(built("MistralConfig"))
    self_test(target)
    assert target.chain_reason == "no trees"
    assert not target.is_same_in_parts and not target.use_kernels
