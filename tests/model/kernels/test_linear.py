"""The kernel of linear layers: used for the rows that it is for, exact, on the current weights.

Run: pytest tests/model/kernels/test_linear.py
"""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from model.backends.proofs.self_test import self_test
from model.backends.target import TargetModel
from model.engine import read_out
from model.engine.loop import generate
from model.kernels import linear as module
from model.kernels.linear import LinearKernels, few_rows, most_rows, suitable_layers
from model.kernels.short_pass import short_pass_kernel
from model.methods import METHODS, drafter_class
from tests.model.decoded import drafter_for, known, random_ids, referee

LLAMA = "Llama, grouped heads"
SIZE = (24, 40)


@pytest.fixture
def _kernel() -> None:
    if not short_pass_kernel():
        pytest.skip("the kernels cannot be built here")


needs_kernel = pytest.mark.usefixtures("_kernel")


def layer_of(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    """Return a layer of random weights."""
    outputs, inputs = SIZE
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


def target_using(
    name: str, forward: module.Forward = few_rows, most_rows: int = sys.maxsize
) -> TargetModel:
    """Return a target whose linear layers all use this function for up to this many rows."""
    target = TargetModel(known(name).build())
    layers = suitable_layers(target.model)
    assert layers
    target.__dict__["linear_kernels"] = LinearKernels(layers, most_rows, forward=forward)
    return target


def noisy(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """Compute a layer with an error far larger than rounding."""
    return 1.5 * nn.functional.linear(rows, layer.weight)


def test_layers_that_are_not_plain_stay_as_they_are() -> None:
    class Special(nn.Linear):
        """A layer with a forward pass of its own."""

    plain, hooked, sliced = layer_of(), layer_of(), layer_of()
    hooked.__dict__["forward"] = hooked.forward
    sliced.weight = nn.Parameter(torch.randn(SIZE[::-1]).t())
    elsewhere = nn.Linear(4, 4, device="meta")
    model = nn.ModuleList([plain, hooked, sliced, elsewhere, Special(4, 4), nn.Bilinear(2, 2, 2)])
    assert suitable_layers(model) == [plain]
    model._orig_mod = None  # type: ignore[assignment]
    assert suitable_layers(model) == []


@needs_kernel
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_computes_what_its_layer_computes(dtype: torch.dtype, bias: bool) -> None:
    layer = layer_of(dtype, bias)
    kernels = LinearKernels([layer])
    for num_rows in (1, 3, 8, 96, 300):
        rows = torch.randn(1, num_rows, SIZE[1], dtype=dtype)
        with torch.inference_mode():
            expected = layer(rows)
            with kernels.for_rows(num_rows).patched():
                assert "forward" in layer.__dict__
                found = layer(rows)
        assert "forward" not in layer.__dict__
        torch.testing.assert_close(found, expected)


@needs_kernel
@pytest.mark.parametrize("name", [LLAMA, "Qwen2, sliding window", "GPT-2"])
def test_tokens_equal_generate_with_the_kernel(name: str) -> None:
    if not suitable_layers(known(name).build()):
        pytest.skip("no linear layers")
    target = target_using(name)
    assert not target.is_reference(1) and not target.is_reference(28)
    self_test(target)
    for method in METHODS:
        if drafter_class(method).drafts_with() in ("draft_model", "heads"):
            continue  # drafts with weights of its own, and verifies like the others
        prompt = random_ids(28)
        answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
        assert answer.token_ids == referee(target, prompt, 40)


@needs_kernel
def test_a_copied_model_computes_with_its_own_weights() -> None:
    target = target_using(LLAMA)
    prompt = random_ids(28)
    expected = referee(target, prompt, 20)
    copied = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in copied.model.parameters():
            parameter.mul_(1.1)
    assert referee(copied, prompt, 20) != expected
    for one in (copied, target):
        answer = generate(one, drafter_for("recycling", one), prompt, max_new_tokens=20)
        assert answer.token_ids == referee(one, prompt, 20)


@pytest.mark.parametrize("method", ["vanilla", "recycling"])
def test_near_ties_are_decided_without_kernels(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_using(LLAMA, noisy)
    prompt = random_ids(28)
    expected = referee(target, prompt, 40)
    wrong = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
    assert wrong.token_ids != expected
    monkeypatch.setattr(read_out, "TIE_STEPS", 1e9)
    answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
    assert answer.token_ids == expected


def test_the_kernel_serves_the_numbers_of_rows_it_is_for() -> None:
    layer = layer_of()
    kernels = LinearKernels([layer], most_rows=96)
    for num_rows in (1, 8, 96, 97, 600):
        with kernels.for_rows(num_rows).patched():
            is_used = "forward" in layer.__dict__
        assert is_used == (num_rows <= 96)
        assert kernels.is_reference(num_rows) != is_used
        with kernels.for_rows(num_rows, in_reference=True).patched():
            assert "forward" not in layer.__dict__


def test_only_units_for_bfloat16_limit_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_units, has_matrices, expected in (
        (True, False, 96),
        (True, True, 32),
        (False, False, sys.maxsize),
    ):
        monkeypatch.setattr(module, "has_bfloat16_units", lambda found=has_units: found)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda found=has_matrices: found)
        assert most_rows(torch.bfloat16) == expected
        assert most_rows(torch.float32) == most_rows(torch.float16) == sys.maxsize


def test_half_precision_is_plain_with_the_kernel() -> None:
    kernels = LinearKernels([layer_of(torch.bfloat16)])
    assert all(kernels.is_reference(num_rows) for num_rows in (1, 8, 600))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_read_with_the_kernels_of_their_length(dtype: torch.dtype) -> None:
    model = known(LLAMA).build().to(dtype)
    target = TargetModel(model)
    layers = suitable_layers(model)
    target.__dict__["linear_kernels"] = LinearKernels(layers, most_rows=32, forward=noisy)
    for num_tokens, has_kernel in ((16, True), (32, True), (40, False)):
        token_ids = torch.tensor(random_ids(num_tokens))
        with torch.inference_mode():
            plain = target.run(token_ids, 0, target.new_cache(50), None)
            read = target.read(token_ids, 0, target.new_cache(50), last_logits_only=False)
        assert torch.equal(plain, read) != has_kernel


def test_a_layer_is_itself_again_after_an_error() -> None:
    layer = layer_of()
    kernels = LinearKernels([layer])
    with pytest.raises(RuntimeError, match="stop"), kernels.for_rows(4).patched():
        raise RuntimeError("stop")
    assert "forward" not in layer.__dict__


@needs_kernel
@pytest.mark.parametrize("change", ["in place", "through data", "another tensor", "bias"])
def test_changed_weights_count_at_once(change: str) -> None:
    layer = layer_of()
    kernels = LinearKernels([layer])
    with torch.no_grad():
        if change == "in place":
            layer.weight[0, 0] += 1
        elif change == "through data":
            layer.weight.data += 0.5
        elif change == "another tensor":
            layer.weight = nn.Parameter(layer.weight + 1)
        else:
            assert layer.bias is not None
            layer.bias = nn.Parameter(layer.bias + 1)
    rows = torch.randn(1, 8, SIZE[1])
    with torch.inference_mode():
        expected = layer(rows)
        with kernels.for_rows(8).patched():
            torch.testing.assert_close(layer(rows), expected)


@needs_kernel
def test_models_that_it_fits_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not TargetModel(known(LLAMA).build()).linear_kernels, "a small model uses kernels"
    monkeypatch.setattr(module, "FEWEST_WEIGHTS", 0)
    target = TargetModel(known(LLAMA).build())
    assert target.linear_kernels.name == "few-rows" and not target.lacks_kernels
    assert not target.linear_kernels.is_reference(1) and not target.is_reference(1)
    off = TargetModel(known(LLAMA).build(), use_kernels=False)
    assert not off.linear_kernels and off.is_reference(1) and not off.lacks_kernels
    assert not TargetModel(known(LLAMA).build().double()).linear_kernels
    monkeypatch.setattr(module, "short_pass_kernel", lambda: None)
    without = TargetModel(known(LLAMA).build())
    assert without.linear_kernels.name == "as-they-are" and without.lacks_kernels
