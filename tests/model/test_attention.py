"""Grouped attention gives transformers' own bits, where it may be used, and leaves no trace.

Run: pytest tests/model/test_attention.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

import model.attention
from model.attention import NAME, can_group_heads, grouped_attention, grouped_heads
from model.draft_tree import DraftTree
from model.hf import TargetModel
from model.self_test import Probe, verified_logits
from tests.model.decoded import known, random_ids
from tests.model.test_families import PREFIX_LENGTH

GROUPED = (
    *("Llama, grouped heads", "Qwen2, sliding window", "Qwen3", "Mistral, sliding window"),
    *("Gemma 3 text", "Gemma 3n text", "Phi 3, sliding window", "Llama 4 text", "GLM-4"),
    *("Cohere 2", "StarCoder 2", "EXAONE 4"),
)
# All heads have keys of their own; eager attention; attention classes that know names alone.
NOT_GROUPED = ("Phi", "GPT-OSS", "Falcon, rotary", "DeepSeek-V3")


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the query length of every call of our attention."""
    calls: list[int] = []

    def spy(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(query.shape[2])
        return grouped_attention(module, query, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, spy)
    return calls


@torch.inference_mode()
@pytest.mark.parametrize("name", GROUPED)
def test_every_node_has_the_same_bits_as_with_repeated_heads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel(known(name).build())
    assert can_group_heads(target.model)
    calls = count_calls(monkeypatch)
    probe = Probe.random(target.vocab_size, False, PREFIX_LENGTH)
    grouped = verified_logits(target, probe)
    assert probe.topology.num_nodes in calls, "the draft did not go through our attention"
    monkeypatch.setattr(target, "_groups_heads", False)
    calls.clear()
    assert torch.equal(verified_logits(target, probe), grouped)
    assert not calls


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX2", reason="where one query is slow alone"
)
@torch.inference_mode()
@pytest.mark.parametrize(
    "name", ("Llama, grouped heads", "Phi", "Gemma 3 text", "Qwen2, sliding window")
)
def test_one_query_as_two_has_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        lengths.append(query.shape[2])
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    target = TargetModel(known(name).build().to(torch.bfloat16))
    cache = target.new_cache(40)
    for token in random_ids(12):
        lengths.clear()
        logits = target.forward(DraftTree.chain([token], target.device), cache)
        assert set(lengths) == {2}
    plain = TargetModel(target.model)
    monkeypatch.setattr(plain, "_pairs_queries", False)
    alone = plain.new_cache(40)
    for token in random_ids(12):
        lengths.clear()
        expected = plain.forward(DraftTree.chain([token], plain.device), alone)
        assert 1 in lengths
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", NOT_GROUPED)
def test_other_models_keep_their_attention(name: str) -> None:
    assert not can_group_heads(known(name).build())


def test_the_model_is_left_as_it_was() -> None:
    config = known("Llama, grouped heads").build().config
    with pytest.raises(RuntimeError, match="in the pass"), grouped_heads(config):
        assert config._attn_implementation == NAME
        raise RuntimeError("in the pass")
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("num_queries", "has_mask", "options", "is_ours"),
    [
        (5, True, {}, True),
        (5, True, {"sliding_window": 4, "position_bias": None}, True),
        (5, False, {}, False),
        (1, True, {}, False),
        (5, True, {"softcap": 30.0}, False),
        (5, True, {"position_bias": torch.zeros(1, 4, 5, 9)}, False),
        (5, True, {"output_attentions": True}, False),
    ],
)
def test_what_the_kernel_cannot_do_goes_to_transformers(
    num_queries: int,
    has_mask: bool,
    options: dict[str, Any],
    is_ours: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delegated: list[dict[str, Any]] = []
    monkeypatch.setattr(
        model.attention,
        "sdpa_attention_forward",
        lambda *args, **kwargs: delegated.append(kwargs) or (args[1], None),
    )
    query = torch.randn(1, 4, num_queries, 8)
    rows = torch.randn(1, 2, 9, 8)
    mask = torch.zeros(1, 1, num_queries, 9) if has_mask else None
    grouped_attention(nn.Module(), query, rows, rows, mask, scaling=0.5, **options)
    assert bool(delegated) != is_ours
    if delegated:
        assert delegated[0].keys() == options.keys(), "an option was lost on the way"


def test_scaling_and_masks_count() -> None:
    query, rows = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 9, 8)
    mask = torch.zeros(1, 1, 5, 9)
    one, _ = grouped_attention(nn.Module(), query, rows, rows, mask, scaling=0.5)
    mask[..., 3] = torch.finfo(torch.float32).min
    assert one.shape == (1, 5, 4, 8)
    for other in (
        grouped_attention(nn.Module(), query, rows, rows, mask, scaling=0.5)[0],
        grouped_attention(nn.Module(), query, rows, rows, torch.zeros(1, 1, 5, 9), scaling=2.0)[0],
    ):
        assert not torch.allclose(one, other, atol=1e-3)
