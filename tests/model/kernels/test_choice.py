"""The choice of kernels: suitable layers, the fastest kernel is used, measured once.

Run: pytest tests/model/kernels/test_choice.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from model.compiled.target import CompiledTarget
from model.engine.target import TargetModel
from model.kernels import choice as module
from model.kernels.choice import measure, suitable_layers
from model.kernels.linear import KERNELS, PACKED, ROWS, Forward, Kernel
from model.kernels.short_pass import short_pass_kernel
from tests.model.decoded import known

LLAMA = "Llama, grouped heads"
SIZE = (24, 40)


@pytest.fixture
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of any size use kernels."""
    monkeypatch.setattr(module, "FEWEST_WEIGHTS", 0)


def layer_of(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    """Return a layer of random weights."""
    outputs, inputs = SIZE
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


def noisy(layer: nn.Linear) -> Forward:
    """Return a layer's function whose error is far larger than rounding."""
    return lambda rows: layer.weight.new_tensor(1.5) * nn.functional.linear(rows, layer.weight)


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
    """Return a kernel for each name that takes these shares of a layer's time; "copy" in the name: a copy."""

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
    """Return the names of the chosen kernels, by rows."""
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

    def ratio(some: Sequence[Forward], others: Sequence[Forward], rows: torch.Tensor) -> float:
        timed[rows.shape[1]] = tuple(function(rows).shape for function in (some[0], others[0]))
        return 0.5

    monkeypatch.setattr(module, "_time_ratio", ratio)
    monkeypatch.setattr(module, "MOST_PRODUCTS", 64 * outputs * inputs)
    assert set(measure([PACKED], [layer_of()])[SIZE]) == set(ROWS)
    assert timed[64] == (torch.Size([1, 64, outputs]),) * 2
    assert timed[512] == (torch.Size([1, 512, outputs // 8]),) * 2


def test_a_kernel_that_this_torch_lacks_is_not_used() -> None:
    def missing(layer: nn.Linear) -> Forward:
        raise RuntimeError("no kernel")

    assert measure([replace(PACKED, made=missing)], [layer_of()]) == {SIZE: {}}


@pytest.mark.usefixtures("small_models_too")
@pytest.mark.parametrize("has_few_rows", [False, True])
def test_measured_once_and_read_from_disk(
    has_few_rows: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if has_few_rows and not short_pass_kernel():
        pytest.skip("the kernel for few rows cannot be built here")
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    if not has_few_rows:
        monkeypatch.setattr(module, "short_pass_kernel", lambda: None)
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


@pytest.mark.usefixtures("small_models_too")
def test_none_where_they_are_turned_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    target = TargetModel(known(LLAMA).build(), use_kernels=False)
    assert not target.linear_kernels and target.attention.name == "attention-0"
    assert not list(tmp_path.iterdir()), "measured all the same"
    assert all(target.is_reference(num_rows) for num_rows in ROWS)


def test_nothing_for_small_models_and_no_copies_without_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    assert not TargetModel(known(LLAMA).build()).linear_kernels, "a small model uses kernels"
    monkeypatch.setattr(module, "FEWEST_WEIGHTS", 0)
    monkeypatch.setattr(module, "short_pass_kernel", lambda: None)
    assert TargetModel(known(LLAMA).build()).linear_kernels
    assert not TargetModel(known(LLAMA).build().double()).linear_kernels, "copies would round"
    monkeypatch.setattr(module, "free_memory", lambda: 1000)
    assert not TargetModel(known(LLAMA).build()).linear_kernels


@pytest.mark.usefixtures("small_models_too")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_passes_read_the_weights_as_they_are(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not short_pass_kernel():
        pytest.skip("the kernel for few rows cannot be built here")
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    target = CompiledTarget(known(LLAMA).build().to(dtype), backend="eager")
    layers = suitable_layers(target.model)
    kernels = target.linear_kernels
    assert kernels.name == "few-rows"
    assert all(target.is_reference(num_rows) for num_rows in ROWS)
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
