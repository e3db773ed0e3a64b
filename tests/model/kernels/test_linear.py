"""Kernels of linear layers: used where they were measured faster, exact, and copies never stale.

Run: pytest tests/model/kernels/test_linear.py
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from model.engine import rules
from model.engine.loop import generate
from model.engine.self_test import self_test
from model.engine.target import TargetModel
from model.kernels import linear as module
from model.kernels.choice import suitable_layers
from model.kernels.linear import (
    FEW_ROWS,
    KERNELS,
    PACKED,
    ROWS,
    Kernel,
    LinearKernels,
    size_of,
)
from model.kernels.short_pass import short_pass_kernel
from model.methods.registry import METHODS, drafter_class
from tests.model.decoded import drafter_for, known, random_ids, referee

LLAMA = "Llama, grouped heads"
SIZE = (24, 40)


@pytest.fixture(params=KERNELS.values(), ids=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """Return each kernel that is available here."""
    kernel: Kernel = request.param
    if kernel is FEW_ROWS and not short_pass_kernel():
        pytest.skip("the kernel for few rows cannot be built here")
    return kernel


def layer_of(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    """Return a layer of random weights."""
    outputs, inputs = SIZE
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


def using(kernel: Kernel, layer: nn.Linear, rows: Sequence[int] = ROWS) -> LinearKernels:
    """Return the kernels of a layer that uses this one for these numbers of rows."""
    return LinearKernels([layer], {size_of(layer): dict.fromkeys(rows, kernel)})


def target_using(name: str, kernel: Kernel, rows: Sequence[int] = ROWS[1:]) -> TargetModel:
    """Return a target whose linear layers all use this kernel for these numbers of rows."""
    target = TargetModel(known(name).build())
    layers = suitable_layers(target.model)
    assert layers
    target.__dict__["linear_kernels"] = LinearKernels(
        layers, {size_of(layer): dict.fromkeys(rows, kernel) for layer in layers}
    )
    return target


@pytest.fixture(params=[False, True], ids=["as it is", "without blocks for half precision"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test as this processor, and as one for which oneDNN packs only float32."""
    if request.param:
        monkeypatch.setattr(module, "has_blocks", lambda dtype: dtype == torch.float32)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kernel_computes_what_its_layer_computes(
    kernel: Kernel, dtype: torch.dtype, bias: bool
) -> None:
    layer = layer_of(dtype, bias)
    kernels = using(kernel, layer)
    for num_rows in (1, 3, 8, 96, 300):
        rows = torch.randn(1, num_rows, SIZE[1], dtype=dtype)
        with torch.inference_mode():
            expected = layer(rows)
            with kernels.for_rows(num_rows):
                assert "forward" in layer.__dict__
                found = layer(rows)
        assert "forward" not in layer.__dict__
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rows", [ROWS, ROWS[1:]], ids=["all rows", "drafts"])
@pytest.mark.parametrize("name", [LLAMA, "Qwen2, sliding window", "GPT-2"])
def test_tokens_equal_generate_with_kernels(
    name: str, rows: tuple[int, ...], kernel: Kernel
) -> None:
    if not suitable_layers(known(name).build()):
        pytest.skip("no linear layers")
    target = target_using(name, kernel, rows)
    assert target.is_reference(1) == (1 not in rows) and not target.is_reference(28)
    self_test(target)
    for method in METHODS:
        if drafter_class(method).drafts_with_model():
            continue  # drafts with a model of its own, and verifies like the others
        prompt = random_ids(28)
        answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
        assert answer.token_ids == referee(target, prompt, 40)


def test_a_copied_model_computes_with_its_own_weights(kernel: Kernel) -> None:
    target = target_using(LLAMA, kernel, ROWS)
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


def noisy(layer: nn.Linear) -> module.Forward:
    """Return a layer's function whose error is far larger than rounding."""
    return lambda rows: layer.weight.new_tensor(1.5) * nn.functional.linear(rows, layer.weight)


@pytest.mark.parametrize("method", ["vanilla", "recycling"])
def test_near_ties_are_decided_without_kernels(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_using(LLAMA, replace(PACKED, made=noisy), ROWS)
    prompt = random_ids(28)
    expected = referee(target, prompt, 40)
    wrong = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
    assert wrong.token_ids != expected
    monkeypatch.setattr(rules, "TIE_STEPS", 1e9)
    answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
    assert answer.token_ids == expected


def test_kernels_serve_the_numbers_of_rows_they_are_for(kernel: Kernel) -> None:
    layer = layer_of()
    kernels = using(kernel, layer, (4, 16, ROWS[-1]))
    used = {}
    for num_rows in range(1, 600):
        with kernels.for_rows(num_rows):
            used[num_rows] = "forward" in layer.__dict__
        assert kernels.is_reference(num_rows) != used[num_rows]
        with kernels.reference(), kernels.for_rows(num_rows):
            assert "forward" not in layer.__dict__
    assert {rows for rows, is_used in used.items() if is_used} == {
        *(3, 4),
        *range(9, 17),
        *range(97, 600),
    }


def test_half_precision_is_plain_with_any_kernel() -> None:
    layer = layer_of(torch.bfloat16)
    kernels = using(PACKED, layer)
    assert all(kernels.is_reference(num_rows) for num_rows in ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_read_with_the_kernels_of_their_length(dtype: torch.dtype) -> None:
    model = known(LLAMA).build().to(dtype)
    target = TargetModel(model)
    layers = suitable_layers(model)
    sizes = {size_of(layer): {32: replace(PACKED, made=noisy)} for layer in layers}
    target.__dict__["linear_kernels"] = LinearKernels(layers, sizes)
    for num_tokens, has_kernel in ((28, True), (16, False), (40, False)):
        token_ids = torch.tensor(random_ids(num_tokens))
        with torch.inference_mode():
            plain = target.run(token_ids, 0, target.new_cache(50), None)
            read = target.read(token_ids, 0, target.new_cache(50), last_logits_only=False)
        assert torch.equal(plain, read) != has_kernel


def test_a_layer_is_itself_again_after_an_error(kernel: Kernel) -> None:
    layer = layer_of()
    kernels = using(kernel, layer, ROWS)
    with pytest.raises(RuntimeError, match="stop"), kernels.for_rows(4):
        raise RuntimeError("stop")
    assert "forward" not in layer.__dict__


@pytest.mark.parametrize("change", ["in place", "through data", "another tensor", "bias"])
def test_changed_weights_are_copied_again(kernel: Kernel, change: str) -> None:
    layer = layer_of()
    kernels = using(kernel, layer, ROWS)
    kernels.refresh()
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
    kernels.refresh()
    rows = torch.randn(1, 8, SIZE[1])
    with torch.inference_mode():
        expected = layer(rows)
        with kernels.for_rows(8):
            torch.testing.assert_close(layer(rows), expected)


def test_prompts_refresh_copies() -> None:
    target = target_using(LLAMA, PACKED)
    prompt = random_ids(28)
    generate(target, drafter_for("recycling", target), prompt, max_new_tokens=20)
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.data *= 1.5
    drafter = drafter_for("recycling", target)
    answer = generate(target, drafter, prompt, max_new_tokens=20)
    assert answer.token_ids == referee(target, prompt, 20)
