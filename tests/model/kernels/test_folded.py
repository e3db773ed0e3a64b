"""Attention over folded heads: torch's numbers for any heads, masks and dtypes, in a model too.

Run: pytest tests/model/kernels/test_folded.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import model.kernels.measured_attention as module
from model.backends.proofs.self_test import Probe, self_test, verified_logits
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.kernels.attention import AttentionKernels
from model.kernels.measured_attention import (
    FOLDED,
    KEYS,
    ROWS,
    can_fold,
    folded_products,
    measured_attention,
)
from model.kernels.registered_attention import USUAL, usual_attention
from tests.model.decoded import drafter_for, known, random_ids, referee
from tests.model.families.test_families import PREFIX_LENGTH

LLAMA = "Llama, grouped heads"
FAMILIES = (
    *(LLAMA, "Qwen2, sliding window", "Qwen3", "Mistral, sliding window", "Gemma", "Gemma 3 text"),
    *("Gemma 3n text", "Phi 3, sliding window", "Llama 4 text", "Cohere 2", "Granite", "EXAONE 4"),
    *("Phi", "DeepSeek-V3"),  # as many heads of keys as of queries; keys and values of two sizes
)
# Heads of queries and of keys, queries, keys, numbers in a key and in a value.
SHAPES = {
    "grouped heads": (6, 2, 81, 593, 64, 64),
    "a group for all": (4, 1, 5, 40, 16, 16),
    "no groups": (4, 4, 7, 33, 16, 16),
    "two sizes": (4, 2, 9, 77, 24, 16),
    "one query": (8, 2, 1, 130, 32, 32),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE = 0.3


def inputs(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value of one of `SHAPES`, laid out as a model and its cache do."""
    num_heads, num_key_heads, n, num_keys, key_size, value_size = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    query = torch.randn(1, n, num_heads, key_size, generator=generator).to(dtype)
    key, value = (
        torch.randn(1, num_key_heads, num_keys + 9, size, generator=generator).to(dtype)
        for size in (key_size, value_size)
    )
    return query.transpose(1, 2), key[:, :, :num_keys], value[:, :, :num_keys]


def masks(n: int, num_keys: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return masks [1, 1, n, T] by which each query sees at least one key."""
    generator = torch.Generator().manual_seed(n)
    seen = torch.rand(1, 1, n, num_keys, generator=generator) < 0.6
    seen[..., 0] = True
    lowest = torch.finfo(dtype).min
    window = torch.ones(n, num_keys, dtype=torch.bool).tril(num_keys - n).triu(num_keys - n - 3)
    return {
        "boolean": seen,
        "additive": torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, lowest),
        "biased": torch.randn(seen.shape, generator=generator).to(dtype),
        "window": torch.zeros(seen.shape, dtype=dtype).masked_fill(~window, lowest),
    }


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative difference of two results."""
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("mask_kind", ["boolean", "additive", "biased", "window"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("attend", FOLDED.values())
def test_rounds_like_torchs_attention(
    attend: Any, name: str, dtype: torch.dtype, mask_kind: str
) -> None:
    query, key, value = inputs(name, dtype)
    num_groups = query.shape[1] // key.shape[1]
    mask = masks(query.shape[2], key.shape[2], dtype)[mask_kind]
    assert can_fold(query, key, value, mask)
    repeated = [rows.repeat_interleave(num_groups, dim=1) for rows in (key, value)]
    wide = mask if mask.dtype == torch.bool else mask.double()
    exact = scaled_dot_product_attention(
        query.double(), *(rows.double() for rows in repeated), wide, scale=SCALE
    ).transpose(1, 2)
    torchs = scaled_dot_product_attention(query, *repeated, mask, scale=SCALE).transpose(1, 2)
    found = attend(query, key, value, mask, SCALE)
    assert found.dtype == dtype and found.shape == exact.shape and found.is_contiguous()
    assert error_of(found, exact) <= 2 * error_of(torchs, exact) + 1e-7


@pytest.mark.parametrize("attend", FOLDED.values())
def test_inputs_stay_as_they_are(attend: Any) -> None:
    query, key, value = inputs("grouped heads", torch.float32)
    mask = masks(query.shape[2], key.shape[2], torch.float32)["additive"]
    given = (query, key, value, mask)
    before = [tensor.clone() for tensor in given]
    attend(*given, SCALE)
    assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_a_gpu_up_to_rounding(
    num_groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's product of half precision in float32, which the CPU lacks, is stood in for."""
    products: list[torch.dtype] = []
    bmm = torch.bmm

    def product(rows: torch.Tensor, columns: torch.Tensor, **options: Any) -> torch.Tensor:
        dtype = options.pop("out_dtype", rows.dtype)
        products.append(dtype)
        return bmm(rows.to(dtype), columns.to(dtype), **options)

    name = "grouped heads" if num_groups > 1 else "no groups"
    query, key, value = inputs(name, dtype)
    mask = masks(query.shape[2], key.shape[2], dtype)["additive"]
    expected = folded_products(query, key, value, mask, SCALE)
    monkeypatch.setattr(torch, "bmm", product)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = folded_products(query, key, value, mask, SCALE)
    assert torch.equal(found, expected)
    assert products == [torch.float32, dtype]


def test_shapes_that_cannot_be_folded_are_known() -> None:
    query, key, value = inputs("grouped heads", torch.float32)
    mask = masks(query.shape[2], key.shape[2], torch.float32)["additive"]
    assert can_fold(query, key, value, mask)
    assert not can_fold(query, key, value, mask.expand(1, 6, -1, -1)), "a mask for each head"
    assert not can_fold(query, key, value, mask[..., 1:]), "a mask of other keys"
    assert not can_fold(query, key, value, mask.double())
    assert not can_fold(query, key.double(), value, mask)
    assert not can_fold(query[:, :5], key, value, mask), "heads that are not shared evenly"
    several = [rows.expand(2, -1, -1, -1) for rows in (query, key, value)]
    assert can_fold(*several, mask.expand(2, -1, -1, -1))
    assert not can_fold(*several, mask), "two texts with one mask"


@pytest.mark.parametrize("function", FOLDED)
@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_each_of_several_texts_attends_to_its_own_keys(name: str, function: str) -> None:
    texts = [inputs(name, torch.float32), [-rows for rows in inputs(name, torch.float32)]]
    query, key, value = map(torch.cat, zip(*texts, strict=True))
    of_kind = masks(query.shape[2], key.shape[2], torch.float32)
    both = torch.cat([of_kind["additive"], of_kind["window"]])
    num_groups = query.shape[1] // key.shape[1]
    layer: Any = SimpleNamespace(num_key_value_groups=num_groups, is_causal=True)
    given = (layer, query, key, value, both)
    found, _ = measured_attention((function,) * len(KEYS), *given, scaling=SCALE)
    for text, mask, one in zip(texts, both, found, strict=True):
        alone, _ = usual_attention(layer, *text, mask[None], scaling=SCALE)
        torch.testing.assert_close(one, alone[0])


def chosen(name: str) -> Any:
    """Return a choice of one function for everything."""
    return ((name,) * len(KEYS),) * len(ROWS)


def target_using(name: str, function: str, dtype: torch.dtype = torch.float32) -> TargetModel:
    """Return a target of a family that attends by this function."""
    target = TargetModel(known(name).build().to(dtype))
    is_plain = dtype != torch.float32
    target.__dict__["attention"] = AttentionKernels(
        target.config, False, False, is_plain, chosen(function)
    )
    return target


@torch.inference_mode()
@pytest.mark.parametrize("function", FOLDED)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_node_has_the_same_logits_within_rounding(
    name: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    attend = FOLDED[function]
    monkeypatch.setitem(
        FOLDED, function, lambda query, *rest: calls.append(query.shape[2]) or attend(query, *rest)
    )
    target = target_using(name, function)
    probe = Probe.random(target.vocab_size, False, PREFIX_LENGTH)
    found = verified_logits(target, probe)
    assert probe.topology.num_nodes in calls, "the draft did not go through our attention"
    calls.clear()
    with target.reference():
        expected = verified_logits(target, probe)
    assert not calls
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["vanilla", "recycling", "pld"])
@pytest.mark.parametrize("function", FOLDED)
@pytest.mark.parametrize("name", [LLAMA, "Gemma 3 text"])
def test_tokens_equal_generate(name: str, function: str, method: str) -> None:
    target = target_using(name, function)
    assert not target.is_reference(1)
    self_test(target)
    prompt = random_ids(28)
    answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
    assert answer.token_ids == referee(target, prompt, 40)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", FOLDED)
def test_half_precision_is_no_further_off_than_with_torchs_attention(
    function: str, dtype: torch.dtype
) -> None:
    exact = TargetModel(known(LLAMA).build())
    probe = Probe.random(exact.vocab_size, False, PREFIX_LENGTH)
    exact.model.to(dtype).float()  # weights that are rounded, in float32
    expected = verified_logits(exact, probe)
    errors = [
        (verified_logits(target_using(LLAMA, name, dtype), probe).float() - expected).norm()
        for name in (USUAL, function)
    ]
    assert errors[1] <= 1.2 * errors[0]


@pytest.mark.parametrize(
    ("num_queries", "mask", "options", "is_ours"),
    [
        (5, (1, 1, 5, 9), {}, True),
        (5, (1, 1, 5, 9), {"sliding_window": 4, "position_bias": None}, True),
        (1, (1, 1, 1, 9), {}, True),
        (5, None, {}, False),
        (5, (1, 4, 5, 9), {}, False),
        (5, (1, 1, 5, 9), {"dropout": 0.1}, False),
        (5, (1, 1, 5, 9), {"softcap": 30.0}, False),
        (5, (1, 1, 5, 9), {"position_bias": torch.zeros(1, 4, 5, 9)}, False),
        (5, (1, 1, 5, 9), {"output_attentions": True}, False),
    ],
)
def test_what_it_cannot_do_goes_to_transformers(
    num_queries: int,
    mask: tuple[int, ...] | None,
    options: dict[str, Any],
    is_ours: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delegated: list[dict[str, Any]] = []
    monkeypatch.setattr(
        module,
        "usual_attention",
        lambda *args, **kwargs: delegated.append(kwargs) or (args[1], None),
    )
    query, rows = torch.randn(1, 4, num_queries, 8), torch.randn(1, 2, 9, 8)
    tensor = None if mask is None else torch.zeros(mask)
    given = (torch.nn.Module(), query, rows, rows, tensor)
    with torch.no_grad():
        measured_attention(("folded",) * len(KEYS), *given, scaling=0.5, **options)
        assert bool(delegated) != is_ours
        if delegated:
            expected = options.keys() - {"dropout"}
            assert delegated[0].keys() == expected, "an option was lost on the way"
        delegated.clear()
        measured_attention((USUAL,) * len(KEYS), *given, scaling=0.5, **options)
        assert delegated
    delegated.clear()
    measured_attention(("folded",) * len(KEYS), *given, scaling=0.5, **options)
    assert delegated, "a gradient would be lost"


@torch.inference_mode()
@pytest.mark.parametrize("scaling", [None, 0.5])
@pytest.mark.parametrize("function", FOLDED)
def test_the_function_depends_on_the_number_of_keys(function: str, scaling: float | None) -> None:
    layer: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    names = (USUAL, function, USUAL, function)
    for num_keys, is_ours in ((40, False), (512, False), (513, True), (1025, False), (9000, True)):
        query, rows = torch.randn(1, 4, 5, 8), torch.randn(1, 2, num_keys, 8)
        given = (layer, query, rows, rows, torch.zeros(1, 1, 5, num_keys))
        expected, _ = usual_attention(*given, scaling=scaling)
        found, _ = measured_attention(names, *given, scaling=scaling)
        torch.testing.assert_close(found, expected)
        ours = FOLDED[function](*given[1:], scaling or 8**-0.5)
        assert torch.equal(found, ours if is_ours else expected)


def test_what_was_chosen_for_the_rows_of_a_pass_is_exchanged() -> None:
    config = SimpleNamespace(_attn_implementation=USUAL)
    attention = AttentionKernels(config, False, False, choice=chosen(USUAL))
    assert attention.is_reference and attention.name == USUAL
    assert not attention.function(8)
    mixed = (*chosen(USUAL)[:-1], (USUAL, *("folded",) * (len(KEYS) - 1)))
    attention = AttentionKernels(config, False, False, choice=mixed)
    assert not attention.is_reference and attention.name == "measured-ssss-ssss-ssss-ssss-sfff"
    sizes = (1, ROWS[-2], ROWS[-2] + 1, ROWS[-1], ROWS[-1] + 1)
    names = [attention.function(num_rows) for num_rows in sizes]
    assert names == ["", "", "measured_sfff", "measured_sfff", ""]
    assert not attention.function(ROWS[-1], in_reference=True)
    always = AttentionKernels(config, False, False, is_plain=True, choice=mixed)
    assert always.is_reference
    found = always.function(ROWS[-1], in_reference=True)
    assert found == "measured_sfff", "half precision has one way"
