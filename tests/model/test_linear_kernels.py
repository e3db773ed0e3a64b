"""Kernels of linear layers: used where they were measured faster, exact, and copies never stale.

Run: pytest tests/model/test_linear_kernels.py
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from model import decoding
from model import linear_kernels as module
from model.decoding import generate
from model.drafter import METHODS
from model.few_rows import few_rows_kernel
from model.hf import TargetModel
from model.linear_kernels import (
    FEW_ROWS,
    KERNELS,
    PACKED,
    ROWS,
    Kernel,
    LinearKernels,
    measure,
    size_of,
    suitable_layers,
)
from model.self_test import self_test
from model.static import CompiledTarget
from tests.model.decoded import drafter_for, known, random_ids, referee

LLAMA = "Llama, grouped heads"
SIZE = (24, 40)


@pytest.fixture(params=KERNELS.values(), ids=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """Return each kernel that can be had here."""
    kernel: Kernel = request.param
    if kernel is FEW_ROWS and not few_rows_kernel():
        pytest.skip("the kernel for few rows cannot be built here")
    return kernel


@pytest.fixture
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of any size use kernels."""
    monkeypatch.setattr(module, "FEWEST_WEIGHTS", 0)


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
    """Let this processor be itself, or one for which oneDNN packs float32 alone."""
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
    assert target.is_plain(1) == (1 not in rows) and not target.is_plain(28)
    self_test(target)
    for method in METHODS:
        if method == "sps":
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
    """Return a layer's function that is off by far more than rounding."""
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
    monkeypatch.setattr(decoding, "TIE_STEPS", 1e9)
    answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
    assert answer.token_ids == expected


def test_kernels_serve_the_numbers_of_rows_they_are_for(kernel: Kernel) -> None:
    layer = layer_of()
    kernels = using(kernel, layer, (4, 16, ROWS[-1]))
    used = {}
    for num_rows in range(1, 600):
        with kernels.for_rows(num_rows):
            used[num_rows] = "forward" in layer.__dict__
        assert kernels.is_plain(num_rows) != used[num_rows]
        with kernels.plainly(), kernels.for_rows(num_rows):
            assert "forward" not in layer.__dict__
    assert {rows for rows, is_used in used.items() if is_used} == {
        *(3, 4),
        *range(9, 17),
        *range(97, 600),
    }


def test_half_precision_is_plain_with_any_kernel() -> None:
    layer = layer_of(torch.bfloat16)
    kernels = using(PACKED, layer)
    assert all(kernels.is_plain(num_rows) for num_rows in ROWS)


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


def given_ratios(monkeypatch: pytest.MonkeyPatch, **ratios: dict[int, float]) -> list[Kernel]:
    """Return a kernel of each name that takes these shares of a layer's time; those of copies are copies."""

    def ratio(some: Sequence[Named], others: object, rows: torch.Tensor) -> float:
        return ratios[some[0].name][rows.shape[1]]

    class Named:
        """A layer's function, by a kernel of this name."""

        def __init__(self, name: str, layer: nn.Linear) -> None:
            self.name, self.layer = name, layer

        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(rows, self.layer.weight, self.layer.bias)

    monkeypatch.setattr(module, "_time_ratio", ratio)
    return [Kernel(name, partial(Named, name), is_copy="copy" in name) for name in ratios]


FASTER = {1: 0.5, 2: 0.94, 4: 0.96, 8: 1.2, 16: 0.3, 32: 1.0, 64: 0.949, 96: 2.0, 512: 0.951}


def names(chosen: dict[int, Kernel]) -> dict[int, str]:
    """Return the names of what was chosen, by rows."""
    return {n: kernel.name for n, kernel in chosen.items()}


@pytest.mark.parametrize("is_small", [False, True])
def test_what_is_faster_is_chosen(is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 2 * SIZE[0] * SIZE[1] * is_small)
    for name in ("ours", "copy"):
        kernels = given_ratios(monkeypatch, **{name: FASTER})
        found = names(measure(kernels, [layer_of()])[SIZE])
        if is_small and name == "copy":
            # The geometric mean of the usual numbers is 0.64.
            assert found == dict.fromkeys((1, 2, 4, 8, 16, 64), name)
        else:
            assert found == dict.fromkeys((1, 2, 16, 64), name)
    kernels = given_ratios(monkeypatch, copy=dict.fromkeys(ROWS, 0.96))
    assert measure(kernels, [layer_of()])[SIZE] == {}


@pytest.mark.parametrize("is_small", [False, True])
def test_the_first_kernel_is_kept_where_another_is_hardly_faster(
    is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SMALL", 2 * SIZE[0] * SIZE[1] * is_small)
    half = dict.fromkeys(ROWS, 0.5)
    kernels = given_ratios(monkeypatch, ours=half, copy=half | {8: 0.4, 16: 0.49, 32: 0.1})
    found = names(measure(kernels, [layer_of()])[SIZE])
    # A small model does not read two sets of weights in turn; the copy's mean is 0.94 of the other's.
    usual = dict.fromkeys((1, 2, 4, 8, 16), "copy") if is_small else {}
    assert found == dict.fromkeys(ROWS, "ours") | usual | {8: "copy", 32: "copy"}
    kernels = given_ratios(monkeypatch, ours=half, copy=half | {8: 0.45, 32: 0.1})
    found = names(measure(kernels, [layer_of()])[SIZE])
    assert found == dict.fromkeys(ROWS, "ours") | {32: "copy"} | ({} if is_small else {8: "copy"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_rows_may_use_a_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    for base in KERNELS.values():
        for smallest in (2**24, 0):
            monkeypatch.setattr(module, "SMALL", smallest)
            found = measure([replace(base, made=noisy)], [layer_of(dtype)])[SIZE]
            assert set(found) == set(ROWS)


def test_many_rows_of_a_large_layer_are_timed_on_some_of_its_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs, inputs = SIZE
    timed: dict[int, tuple[torch.Size, ...]] = {}

    def ratio(
        some: Sequence[module.Forward], others: Sequence[module.Forward], rows: torch.Tensor
    ) -> float:
        timed[rows.shape[1]] = tuple(function(rows).shape for function in (some[0], others[0]))
        return 0.5

    monkeypatch.setattr(module, "_time_ratio", ratio)
    monkeypatch.setattr(module, "MOST_PRODUCTS", 64 * outputs * inputs)
    assert set(measure([PACKED], [layer_of()])[SIZE]) == set(ROWS)
    assert timed[64] == (torch.Size([1, 64, outputs]),) * 2
    assert timed[512] == (torch.Size([1, 512, outputs // 8]),) * 2


def test_a_kernel_that_this_torch_lacks_is_not_used() -> None:
    def missing(layer: nn.Linear) -> module.Forward:
        raise RuntimeError("no kernel")

    assert measure([replace(PACKED, made=missing)], [layer_of()]) == {SIZE: {}}


@pytest.mark.usefixtures("small_models_too")
@pytest.mark.parametrize("has_few_rows", [False, True])
def test_measured_once_and_read_from_disk(
    has_few_rows: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if has_few_rows and not few_rows_kernel():
        pytest.skip("the kernel for few rows cannot be built here")
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    if not has_few_rows:
        monkeypatch.setattr(module, "few_rows_kernel", lambda: None)
    kernels = TargetModel(known(LLAMA).build()).linear_kernels
    assert kernels.name == ("few-rows" if has_few_rows else "packed")
    (file,) = tmp_path.glob("linear-kernels-*.json")

    def again(*args: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(module, "_time_ratio", again)
    assert TargetModel(known(LLAMA).build()).linear_kernels.name == kernels.name
    written = json.loads(file.read_text())
    no_kernel = written | {"sizes": [[*entry[:2], []] for entry in written["sizes"]]}
    file.write_text(json.dumps(no_kernel))
    assert TargetModel(known(LLAMA).build()).linear_kernels.name == "as-they-are"
    unknown = written | {"sizes": [[4, 4, [[1, "unknown"]]]]}
    for content in ({"not": "ours"}, [[4, 4, []]], unknown, no_kernel | {"rows": [1, 2]}):
        file.write_text(json.dumps(content))
        with pytest.raises(AssertionError, match="measured again"):
            _ = TargetModel(known(LLAMA).build()).linear_kernels


def test_nothing_for_small_models_and_no_copies_without_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    assert not TargetModel(known(LLAMA).build()).linear_kernels, "a small model uses kernels"
    monkeypatch.setattr(module, "FEWEST_WEIGHTS", 0)
    monkeypatch.setattr(module, "few_rows_kernel", lambda: None)
    assert TargetModel(known(LLAMA).build()).linear_kernels
    assert not TargetModel(known(LLAMA).build().double()).linear_kernels, "copies would round"
    monkeypatch.setattr(module, "free_memory", lambda: 1000)
    assert not TargetModel(known(LLAMA).build()).linear_kernels


@pytest.mark.usefixtures("small_models_too")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_passes_read_the_weights_as_they_are(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not few_rows_kernel():
        pytest.skip("the kernel for few rows cannot be built here")
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    target = CompiledTarget(known(LLAMA).build().to(dtype), backend="eager")
    layers = suitable_layers(target.model)
    kernels = target.linear_kernels
    assert kernels.name == "few-rows"
    assert all(target.is_plain(num_rows) for num_rows in ROWS)
    with kernels.for_rows(1):
        functions = [layer.forward for layer in layers]
    with torch.no_grad():
        layers[0].weight += 1
    kernels.refresh()
    with kernels.for_rows(1):
        assert [layer.forward for layer in layers] == functions, "code would be compiled again"
        rows = torch.randn(1, 1, layers[0].in_features, dtype=dtype)
        with torch.inference_mode():
            found = layers[0](rows)
    torch.testing.assert_close(found, layers[0](rows))
