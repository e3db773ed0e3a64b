"""Swapped attention: grouped heads give transformers' bits, the kernel its tokens; the model stays unchanged.

Run: pytest tests/model/kernels/test_attention.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

import model.kernels.attention as module
from model.backends.proofs.self_test import Probe, self_test, verified_logits
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.kernels import registered_attention
from model.kernels.attention import (
    FEW_QUERIES,
    GROUPED,
    AttentionKernels,
    can_exchange,
    few_queries_attention,
    few_queries_of_sequences,
    grouped_attention,
)
from model.kernels.linear import LinearKernels, suitable_layers
from model.kernels.registered_attention import SequenceRows, packed_name, with_sequences
from model.kernels.short_pass import DTYPES, short_pass_kernel
from model.machine.own_forwards import attending
from model.methods import METHODS, drafter_class
from tests.model.decoded import drafter_for, known, random_ids, referee
from tests.model.families.test_families import PREFIX_LENGTH

LLAMA = "Llama, grouped heads"
GROUPED_HEADS = (
    *(LLAMA, "Qwen2, sliding window", "Qwen3", "Mistral, sliding window"),
    *("Gemma 3 text", "Gemma 3n text", "Phi 3, sliding window", "Llama 4 text", "GLM-4"),
    *("Cohere 2", "StarCoder 2", "EXAONE 4"),
)
# Eager attention; attention classes that know names alone.
NOT_EXCHANGED = ("GPT-OSS", "Falcon, rotary")


@pytest.fixture
def _kernel() -> None:
    if not short_pass_kernel():
        pytest.skip("the kernels cannot be built here")


needs_kernel = pytest.mark.usefixtures("_kernel")


def count_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the query lengths of all calls of a registered attention."""
    calls: list[int] = []
    function = AttentionInterface._global_mapping[name]

    def spy(layer: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(query.shape[2])
        return function(layer, query, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, name, spy)
    return calls


def target_using(name: str, has_kernel: bool, dtype: torch.dtype = torch.float32) -> TargetModel:
    """Return a target of a family that uses the kernel, or does not."""
    return target_of(known(name).build(), has_kernel, dtype)


def target_of(model: PreTrainedModel, has_kernel: bool, dtype: torch.dtype) -> TargetModel:
    """Return a target that uses the kernel, or does not."""
    target = TargetModel(model.to(dtype))
    is_plain = dtype != torch.float32
    target.__dict__["attention"] = AttentionKernels(target.config, True, has_kernel, is_plain)
    return target


@torch.inference_mode()
@pytest.mark.parametrize("name", GROUPED_HEADS)
def test_every_node_has_the_same_bits_as_with_repeated_heads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel(known(name).build())
    calls = count_calls(GROUPED, monkeypatch)
    probe = Probe.random(target.vocab_size, False, PREFIX_LENGTH)
    grouped = verified_logits(target, probe)
    assert probe.topology.num_nodes in calls, "the draft did not go through our attention"
    target.__dict__["attention"] = AttentionKernels(
        target.config, groups_heads=False, has_kernel=False
    )
    target._swaps.clear()  # they hold the attention of before
    calls.clear()
    assert torch.equal(verified_logits(target, probe), grouped)
    assert not calls


@needs_kernel
@pytest.mark.parametrize("name", (*GROUPED_HEADS, "Phi", "DeepSeek-V3"))
def test_tokens_equal_generate_with_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_using(name, has_kernel=True)
    assert can_exchange(target.model)
    calls = count_calls(FEW_QUERIES, monkeypatch)
    self_test(target)
    prompt = random_ids(28)
    expected = referee(target, prompt, 40)
    for method in METHODS:
        if drafter_class(method).drafts_with() in ("draft_model", "heads"):
            continue  # drafts with weights of its own, and verifies like the others
        calls.clear()
        answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
        assert answer.token_ids == expected, method
        assert calls, "no pass went through the kernel"


@needs_kernel
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_off_than_with_torchs_kernel(dtype: torch.dtype) -> None:
    exact = target_using(LLAMA, has_kernel=False)
    probe = Probe.random(exact.vocab_size, False, PREFIX_LENGTH)
    # Weights that are rounded, in float32.
    exact.model.to(dtype).float()
    expected = verified_logits(exact, probe)
    errors = [
        (verified_logits(target_using(LLAMA, has_kernel, dtype), probe).float() - expected).norm()
        for has_kernel in (False, True)
    ]
    assert errors[1] <= 1.1 * errors[0]


@needs_kernel
@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [LLAMA, "Qwen3", "Gemma 3 text"])
def test_a_draft_has_the_bits_of_single_steps_with_our_kernels(
    name: str, dtype: torch.dtype
) -> None:
    family = known(name)
    # Torch computes the last numbers of a tensor, fewer than two vectors, by another exponential function:
    # rows of whole pairs of vectors have none.
    options = {**family.options, "intermediate_size": 64}
    target = target_of(replace(family, options=options).build(), True, dtype)
    layers = suitable_layers(target.model)
    target.__dict__["linear_kernels"] = LinearKernels(layers)
    text = random_ids(60)
    cache = target.new_cache(80)
    list(target.prefill(text[:21], cache, False))
    base = cache.length
    steps = [target.forward(DraftTree.chain([token]), cache) for token in text[20:]]
    for count in (2, 3, 8, 17, 40):
        cache.keep(base, ())
        draft = DraftTree.chain(text[20 : 20 + count])
        assert torch.equal(target.forward(draft, cache), torch.cat(steps[:count])), count
    # A tree's nodes too: here the draft's tokens under two children of the root.
    cache.keep(base, ())
    tokens = [text[20], *text[21:25], *text[21:25]]
    tree = DraftTree.from_lists(tokens, (-1, 0, 1, 2, 3, 0, 5, 6, 7))
    logits = target.forward(tree, cache)
    assert torch.equal(logits[:5], torch.cat(steps[:5]))
    assert torch.equal(logits[5:], torch.cat(steps[1:5]))


@needs_kernel
def test_plain_decoding_attends_as_the_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_using(LLAMA, has_kernel=True)
    calls = count_calls(FEW_QUERIES, monkeypatch)
    assert not target.is_reference(1)
    for num_rows in (1, 8):
        prompt = torch.tensor(random_ids(num_rows))
        cache = target.new_cache(60)
        with torch.inference_mode():
            list(target.prefill(random_ids(20), cache, False))
            with target.reference():
                calls.clear()
                target.read(prompt, cache.length, cache, last_logits_only=False)
                assert not calls
            target.read(prompt, cache.length, cache, last_logits_only=False)
        assert calls
    always = AttentionKernels(target.config, True, True, is_plain=True)
    assert always.is_reference
    assert always.function(1, in_reference=True) == FEW_QUERIES, "half precision has one way"


def test_models_that_choose_among_keys_keep_their_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They ask whether the attention has one of transformers' names, and else leave the choice to it."""
    monkeypatch.setattr(module, "FEWEST_WEIGHTS", 0)
    target = TargetModel(known("DeepSeek-V3.2").build())
    self_test(target)
    assert target.attention.name == "sdpa"


@pytest.mark.parametrize("name", NOT_EXCHANGED)
def test_other_models_keep_their_attention(name: str) -> None:
    target = TargetModel(known(name).build())
    assert not target.attention.function(1)
    assert not can_exchange(target.model)


def test_the_model_is_left_as_it_was() -> None:
    config = known(LLAMA).build().config
    with pytest.raises(RuntimeError, match="in the pass"), attending(config, GROUPED):
        assert config._attn_implementation == GROUPED
        raise RuntimeError("in the pass")
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("num_queries", "mask", "options", "groups", "few"),
    [
        (5, (1, 1, 5, 9), {}, True, True),
        (5, (1, 1, 5, 9), {"sliding_window": 4, "position_bias": None}, True, True),
        (5, None, {}, False, False),
        (9, None, {}, False, True),
        (9, None, {"is_causal": True}, False, True),
        (9, None, {"is_causal": False}, False, False),
        (129, (1, 1, 129, 9), {}, True, False),
        (1, None, {}, False, True),
        (1, (1, 1, 1, 9), {}, False, True),
        (5, (1, 4, 5, 9), {}, True, False),
        (5, (1, 1, 5, 9), {"dropout": 0.1}, True, False),
        (5, (1, 1, 5, 9), {"softcap": 30.0}, False, False),
        (5, (1, 1, 5, 9), {"position_bias": torch.zeros(1, 4, 5, 9)}, False, False),
        (5, (1, 1, 5, 9), {"output_attentions": True}, False, False),
    ],
)
@needs_kernel
def test_what_a_kernel_cannot_do_goes_to_transformers(
    num_queries: int,
    mask: tuple[int, ...] | None,
    options: dict[str, Any],
    groups: bool,
    few: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delegated: list[dict[str, Any]] = []
    sdpa: list[torch.Tensor] = []
    attend = nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        sdpa.append(args[0])
        return attend(*args, **kwargs)

    monkeypatch.setattr(
        registered_attention,
        "sdpa_attention_forward",
        lambda *args, **kwargs: delegated.append(kwargs) or (args[1], None),
    )
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    query, rows = torch.randn(1, 4, num_queries, 8), torch.randn(1, 2, 9, 8)
    tensor = None if mask is None else torch.zeros(mask)
    for function, is_ours in ((grouped_attention, groups), (few_queries_attention, groups or few)):
        delegated.clear()
        sdpa.clear()
        function(nn.Module(), query, rows, rows, tensor, scaling=0.5, **options)
        assert bool(delegated) != is_ours
        if function is few_queries_attention:
            assert bool(sdpa) == (is_ours and not few)
        if delegated:
            expected = options.keys() - {"dropout"}
            assert delegated[0].keys() == expected, "an option was lost on the way"


@needs_kernel
@pytest.mark.parametrize("function", [grouped_attention, few_queries_attention])
def test_scaling_and_masks_count(function: Any) -> None:
    query, rows = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 9, 8)
    mask = torch.zeros(1, 1, 5, 9)
    one, _ = function(nn.Module(), query, rows, rows, mask, scaling=0.5)
    usual, _ = function(nn.Module(), query, rows, rows, mask)
    mask[..., 3] = torch.finfo(torch.float32).min
    assert one.shape == (1, 5, 4, 8)
    for other in (
        usual,
        function(nn.Module(), query, rows, rows, mask, scaling=0.5)[0],
        function(nn.Module(), query, rows, rows, torch.zeros(1, 1, 5, 9), scaling=2.0)[0],
    ):
        assert not torch.allclose(one, other, atol=1e-3)
    expected, _ = grouped_attention(nn.Module(), query, rows, rows, mask, scaling=0.5)
    found, _ = function(nn.Module(), query, rows, rows, mask, scaling=0.5)
    torch.testing.assert_close(found, expected)


@needs_kernel
def test_models_that_it_fits_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TargetModel(known(LLAMA).build()).attention.name == "sdpa", "a small model"
    monkeypatch.setattr(module, "FEWEST_WEIGHTS", 0)
    target = TargetModel(known(LLAMA).build())
    assert target.attention.name == "few-queries" and not target.attention.is_reference
    assert TargetModel(known(LLAMA).build(), use_kernels=False).attention.name == "sdpa"
    assert TargetModel(known(LLAMA).build().double()).attention.name == "sdpa"
    monkeypatch.setattr(module, "short_pass_kernel", lambda: None)
    assert TargetModel(known("Phi").build()).attention.name == "sdpa"


def test_beside_a_packed_pass_an_eager_model_attends_as_it_is() -> None:
    """Another thread runs the model as it is, while the name of a packed pass's attention stands in its config."""
    model = known("Gemma 2").build()
    model.set_attn_implementation("eager")
    ids = torch.tensor([random_ids(24)])
    expected = model(ids).logits
    with attending(model.config, packed_name("eager")), ThreadPoolExecutor() as pool:
        assert torch.equal(pool.submit(lambda: model(ids).logits).result(), expected)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_masked", [False, True])
def test_texts_in_one_call_have_the_bits_of_one_call_each(
    dtype: torch.dtype, is_masked: bool
) -> None:
    ours, sizes, lengths = torch.ops.token_recycling, [1, 40, 3, 1], [70, 5, 33, 0]
    ends = [size + length for size, length in zip(sizes, lengths, strict=True)]
    torch.manual_seed(0)
    query = torch.randn(1, sum(sizes), 6, 24).to(dtype).transpose(1, 2)
    keys, values = (torch.randn(1, 2, sum(sizes), size).to(dtype) for size in (24, 16))
    mask = torch.randn(1, 1, sum(sizes), max(ends))
    buffers = [[torch.randn(1, 2, 80, size).to(dtype) for _ in sizes] for size in (24, 16)]
    expected, begin = [], 0
    for size, length, *rows in zip(sizes, lengths, *buffers, strict=True):
        end = begin + size
        for part, new in zip(rows, (keys, values), strict=True):
            part[:, :, length : length + size] = new[:, :, begin:end]
        seen = mask[:, :, begin:end, : length + size] if size > 1 or is_masked else None
        own = (part[:, :, : length + size] for part in rows)
        expected.append(ours.attend(query[:, :, begin:end], *own, seen, 0.2, False))
        for part in rows:
            part[:, :, length : length + size] = 0
        begin = end
    ours.append_texts(keys, values, *buffers, sizes, lengths)
    found = ours.attend_texts(query, *buffers, mask, 0.2, sizes, ends, is_masked)
    assert torch.equal(found, torch.cat(expected, 1))


@needs_kernel
def test_texts_with_masks_by_head_are_attended_one_by_one() -> None:
    sizes, lengths, layer = [2, 1], [5, 3], nn.Module()
    layer.num_key_value_groups = 2  # type: ignore[assignment]
    keys, values = ([torch.randn(1, 2, 8, 16) for _ in sizes] for _ in range(2))
    ends = [size + length for size, length in zip(sizes, lengths, strict=True)]
    new = with_sequences(torch.randn(1, 2, 3, 16), SequenceRows(sizes, ends, keys, values, True))
    query, mask = torch.randn(1, 4, 3, 16), torch.randn(1, 4, 3, max(ends))
    found, _ = few_queries_of_sequences(layer, query, new, new, mask, scaling=0.25)
    for rows, end, key, value in zip((slice(0, 2), slice(2, 3)), ends, keys, values, strict=True):
        own = (query[:, :, rows], key[:, :, :end], value[:, :, :end], mask[:, :, rows, :end])
        right = nn.functional.scaled_dot_product_attention(*own, scale=0.25, enable_gqa=True)
        torch.testing.assert_close(found[:, rows], right.transpose(1, 2))
