"""Copies of weights in other layouts: used where they were measured faster, exact, and never stale.

Run: pytest tests/model/test_linear_layouts.py
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from model import decoding
from model import linear_layouts as module
from model.decoding import generate
from model.drafter import METHODS
from model.hf import TargetModel
from model.linear_layouts import (
    DOT_PRODUCTS,
    MOST_DOT_ROWS,
    PACKED,
    PROMPT_ROWS,
    ROWS,
    Layout,
    LinearLayouts,
    measure,
    size_of,
    suitable_layers,
)
from model.self_test import self_test
from tests.model.decoded import drafter_for, known, random_ids, referee

LAYOUTS = [PACKED, DOT_PRODUCTS]
LLAMA = "Llama, grouped heads"
SIZE = (24, 40)


@pytest.fixture(params=LAYOUTS, ids=[layout.name for layout in LAYOUTS])
def layout(request: pytest.FixtureRequest) -> Layout:
    """Return each layout."""
    layout: Layout = request.param
    return layout


@pytest.fixture
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of any size have copies."""
    monkeypatch.setattr(module, "FEWEST_WEIGHTS", 0)


def layer_of(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    """Return a layer of random weights."""
    outputs, inputs = SIZE
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


def with_copies(name: str, layout: Layout, rows: tuple[int, ...] = ROWS[1:]) -> TargetModel:
    """Return a target whose linear layers all compute with copies for these numbers of rows."""
    target = TargetModel(known(name).build())
    layers = suitable_layers(target.model)
    assert layers
    target.__dict__["linear_layouts"] = LinearLayouts(
        layout, layers, {size_of(layer): rows for layer in layers}
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
def test_a_copy_computes_what_its_layer_computes(
    layout: Layout, dtype: torch.dtype, bias: bool
) -> None:
    layer = layer_of(dtype, bias)
    layouts = LinearLayouts(layout, [layer], {SIZE: (*ROWS, PROMPT_ROWS)})
    for num_rows in (1, 3, 8, 96, 300):
        rows = torch.randn(1, num_rows, SIZE[1], dtype=dtype)
        with torch.inference_mode():
            expected = layer(rows)
            with layouts.for_rows(num_rows):
                assert "forward" in layer.__dict__
                found = layer(rows)
        assert "forward" not in layer.__dict__
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rows", [ROWS, ROWS[1:]], ids=["all rows", "drafts"])
@pytest.mark.parametrize("name", [LLAMA, "Qwen2, sliding window", "GPT-2"])
def test_tokens_equal_generate_with_copies(
    name: str, rows: tuple[int, ...], layout: Layout
) -> None:
    if not suitable_layers(known(name).build()):
        pytest.skip("no linear layers")
    target = with_copies(name, layout, rows)
    assert target.single_rows_are_plain == (layout.is_compiled or 1 not in rows)
    self_test(target)
    for method in METHODS:
        if method == "sps":
            continue  # drafts with a model of its own, and verifies like the others
        prompt = random_ids(28)
        answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
        assert answer.token_ids == referee(target, prompt, 40)


def noisy(layer: nn.Linear) -> module.Forward:
    """Return a layer's function on a copy that is off by far more than rounding."""
    return lambda rows: layer.weight.new_tensor(1.5) * nn.functional.linear(rows, layer.weight)


@pytest.mark.parametrize("method", ["vanilla", "recycling"])
def test_near_ties_are_decided_without_copies(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = replace(PACKED, copied=noisy)
    target = with_copies(LLAMA, layout, ROWS)
    prompt = random_ids(28)
    expected = referee(target, prompt, 40)
    wrong = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
    assert wrong.token_ids != expected
    monkeypatch.setattr(decoding, "TIE_STEPS", 1e9)
    answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
    assert answer.token_ids == expected


def test_copies_serve_the_numbers_of_rows_they_are_for(layout: Layout) -> None:
    layer = layer_of()
    layouts = LinearLayouts(layout, [layer], {SIZE: (4, 16, PROMPT_ROWS)})
    used = {}
    for num_rows in range(1, 200):
        with layouts.for_rows(num_rows):
            used[num_rows] = "forward" in layer.__dict__
    assert {rows for rows, is_used in used.items() if is_used} == {
        *(3, 4),
        *range(9, 17),
        *range(97, 200),
    }


@pytest.mark.usefixtures("small_models_too")
def test_prompts_use_copies_in_half_precision_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    monkeypatch.setattr(module, "read_measured", lambda name, key: None)
    for dtype in (torch.float32, torch.bfloat16):
        target = TargetModel(known(LLAMA).build().to(dtype))
        (layer, *_) = suitable_layers(target.model)
        with target.linear_layouts.for_prompt():
            assert ("forward" in layer.__dict__) == (dtype == torch.bfloat16)


def test_prompts_in_half_precision_are_read_with_copies() -> None:
    model = known(LLAMA).build().bfloat16()
    target = TargetModel(model)
    layers = suitable_layers(model)
    sizes = {size_of(layer): (PROMPT_ROWS,) for layer in layers}
    target.__dict__["linear_layouts"] = LinearLayouts(replace(PACKED, copied=noisy), layers, sizes)
    token_ids = torch.tensor(random_ids(28))
    with torch.inference_mode():
        plain = target.run(token_ids, 0, target.new_cache(30), None)
        read = target.read(token_ids, 0, target.new_cache(30), last_logits_only=False)
    assert not torch.allclose(plain, read)


def test_a_layer_is_itself_again_after_an_error(layout: Layout) -> None:
    layer = layer_of()
    layouts = LinearLayouts(layout, [layer], {SIZE: ROWS})
    with pytest.raises(RuntimeError, match="stop"), layouts.for_rows(4):
        raise RuntimeError("stop")
    assert "forward" not in layer.__dict__


@pytest.mark.parametrize("change", ["in place", "through data", "another tensor", "bias"])
def test_changed_weights_are_copied_again(layout: Layout, change: str) -> None:
    layer = layer_of()
    layouts = LinearLayouts(layout, [layer], {SIZE: ROWS})
    layouts.refresh()
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
    layouts.refresh()
    rows = torch.randn(1, 8, SIZE[1])
    with torch.inference_mode():
        expected = layer(rows)
        with layouts.for_rows(8):
            torch.testing.assert_close(layer(rows), expected)


def test_prompts_refresh_copies() -> None:
    target = with_copies(LLAMA, PACKED)
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


@pytest.mark.parametrize("is_small", [False, True])
def test_what_is_faster_is_chosen(is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 2 * SIZE[0] * SIZE[1] * is_small)
    faster = {1: 0.5, 2: 0.94, 4: 0.96, 8: 1.2, 16: 0.3, 32: 1.0, 64: 0.949, 96: 2.0}
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: faster[rows.shape[1]])
    layers = [layer_of()]
    found = measure(PACKED, layers)[SIZE]
    if is_small:
        assert found == set(ROWS)  # the geometric mean of the usual numbers is 0.64
        monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.96)
        assert measure(PACKED, layers)[SIZE] == set()
    else:
        assert found == {1, 2, 16, 64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_row_uses_a_copy_where_near_ties_are_decided_or_bits_are_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact(layer: nn.Linear) -> module.Forward:
        return lambda rows: nn.functional.linear(rows, layer.weight, layer.bias)

    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    layers, may_round = [layer_of(dtype)], dtype == torch.float32
    everywhere = set(ROWS) if may_round else {*ROWS, PROMPT_ROWS}
    for _ in range(2):
        assert measure(replace(PACKED, copied=exact), layers)[SIZE] == everywhere
        found = measure(replace(PACKED, copied=noisy), layers)[SIZE]
        assert found == everywhere - (set() if may_round else {1})
        monkeypatch.setattr(module, "SMALL", 0)


def test_a_layout_that_this_torch_lacks_is_not_used() -> None:
    def missing(layer: nn.Linear) -> module.Forward:
        raise RuntimeError("no kernel")

    assert measure(replace(PACKED, copied=missing), [layer_of()]) == {SIZE: frozenset()}


@pytest.mark.usefixtures("small_models_too")
def test_measured_once_and_read_from_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    assert TargetModel(known(LLAMA).build()).linear_layouts
    (file,) = tmp_path.glob("packed-layers-*.json")

    def again(*args: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(module, "_time_ratio", again)
    assert TargetModel(known(LLAMA).build()).linear_layouts
    entries = json.loads(file.read_text())
    file.write_text(json.dumps([[*entry[:2], []] for entry in entries]))
    assert not TargetModel(known(LLAMA).build()).linear_layouts
    file.write_text('{"not": "ours"}')
    with pytest.raises(AssertionError, match="measured again"):
        _ = TargetModel(known(LLAMA).build()).linear_layouts


def test_no_copies_for_small_models_or_without_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_time_ratio", lambda some, others, rows: 0.5)
    assert not TargetModel(known(LLAMA).build()).linear_layouts, "a small model was copied"
    monkeypatch.setattr(module, "FEWEST_WEIGHTS", 0)
    assert TargetModel(known(LLAMA).build()).linear_layouts
    monkeypatch.setattr(module, "_free_memory", lambda: 1000)
    assert not TargetModel(known(LLAMA).build()).linear_layouts


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on a CPU needs g++")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_generated_dot_products_are_what_the_layer_computes(dtype: torch.dtype, bias: bool) -> None:
    layer = layer_of(dtype, bias)
    forward = DOT_PRODUCTS.copied(layer)
    with torch.inference_mode():
        for num_rows in (1, 3, MOST_DOT_ROWS):
            torch._dynamo.reset()
            compiled = torch.compile(
                # Rows that are not in order, and have to be worked out first.
                lambda columns: forward((2 * columns).t()[None]),
                fullgraph=True,
                dynamic=False,
                options={"cpp_wrapper": True},
            )
            columns = torch.randn(SIZE[1], num_rows, dtype=dtype)
            exact = (2 * columns).t()[None].double() @ layer.weight.double().t()
            if layer.bias is not None:
                exact += layer.bias.double()
            # Summed in float32 at least, and rounded once.
            torch.testing.assert_close(
                compiled(columns).double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-6
            )
    torch._dynamo.reset()


@pytest.mark.parametrize("has_units", [False, True])
def test_compiled_passes_use_the_weights_as_they_are(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_blocks", lambda dtype: has_units)
    monkeypatch.setattr(TargetModel, "layout", DOT_PRODUCTS)
    for dtype in (torch.float32, torch.bfloat16):
        target = TargetModel(known(LLAMA).build().to(dtype))
        layers = suitable_layers(target.model)
        layouts = target.linear_layouts
        is_faster = dtype == torch.float32 or not has_units
        for num_rows in (MOST_DOT_ROWS + 1, 1, MOST_DOT_ROWS):
            with layouts.for_rows(num_rows):
                used = ["forward" in layer.__dict__ for layer in layers]
                functions = [layer.forward for layer in layers]
            assert used == [is_faster and num_rows <= MOST_DOT_ROWS] * len(layers)
        with torch.no_grad():
            layers[0].weight += 1
        layouts.refresh()
        with layouts.for_rows(MOST_DOT_ROWS):
            again = [layer.forward for layer in layers]
        assert again == functions, "code would be compiled again after a change of weights"
