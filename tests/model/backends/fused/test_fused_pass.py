"""Fused passes: the model's logits for every family that is recognised, and the same bits for every row."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from model.backends.fused import fused_pass, proof
from model.backends.fused.fused_pass import FusedPass
from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.passes.hidden import FINAL
from model.backends.proofs.self_test import self_test
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.engine.tree import DraftTree, TreeTopology
from tests.model.decoded import drafter_for, known
from tests.model.families.family import Family

Maker = Callable[[Any], GraphedTarget]
LLAMA = "Llama, grouped heads"

# With windows, biases, norms, gates, and parts of heads that turn.
FAMILIES = (
    LLAMA,
    "Llama, yarn rope",
    "Llama, llama3 rope",
    "Mistral, sliding window",
    "Qwen2",
    "Qwen2, sliding window",
    "Qwen3",
    "Phi 3",
    "Phi 3, sliding window",
    "Gemma",
    "Gemma 2",
    "Gemma 3 text",
    "OLMo 2",
    "OLMo 3",
    "GLM-4",
)
# Heads of a size that is no power of two, groups of three, and sizes that no tile divides.
ODD = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
TREE = TreeTopology.from_parents((-1, 0, 0, 1, 1, 2, 3, 6, 7))
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43, 3, 8, 32, 7, 9, 5]


def half(family: Family, **options: Any) -> Any:
    """Return a family's model in half precision."""
    return replace(family, options={**family.options, **options}).build().half()


@torch.inference_mode()
def logits_after(target: TargetModel, tree: DraftTree) -> torch.Tensor:
    """Return the logits of a draft after the prompt."""
    cache = target.new_cache(len(PROMPT) + 32)
    for _ in target.prefill(PROMPT, cache, with_logits=False):
        pass
    return target.forward(tree, cache).float()


def error_of(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return the relative error."""
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_recognised_and_right(name: str, fused_target: Maker) -> None:
    model = half(known(name))
    target = fused_target(model)
    assert target.fused is not None, target.why_not_fused
    tree = DraftTree(torch.arange(4, 4 + TREE.num_nodes), TREE)
    found = logits_after(target, tree)
    right = logits_after(TargetModel(model.float(), use_kernels=False), tree)
    stock = logits_after(TargetModel(half(known(name)), False), tree)
    assert error_of(found, right) <= 2 * error_of(stock, right) + 1e-4


@pytest.mark.parametrize(("name", "base"), [(LLAMA, 60), ("Gemma 3 text", 29)])
def test_nodes_have_the_bits_of_plain_decoding(
    name: str, base: int, fused_target: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "BASES", (base,))
    monkeypatch.setattr(fused_pass, "SPLIT", 32)
    monkeypatch.setattr(fused_pass, "BLOCK", 16)
    target = fused_target(half(known(name)))
    assert target.fused is not None and target.fused.has_same_bits, target.kernel_names


def test_a_node_with_other_bits_is_found(
    fused_target: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "BASES", (5,))
    take = FusedPass.logits

    def other_bits(self: FusedPass, token_ids: torch.Tensor, *given: Any) -> torch.Tensor:
        found = take(self, token_ids, *given)
        return found + found.abs() * 1e-3 if token_ids.numel() > 16 else found

    monkeypatch.setattr(FusedPass, "logits", other_bits)
    target = fused_target(half(known(LLAMA)))
    assert target.kernel_names["passes"] == "fused, other bits beside 19 others after 5 tokens"


def test_odd_sizes(fused_target: Maker) -> None:
    target = fused_target(half(known(LLAMA), **ODD))
    assert target.fused is not None, target.why_not_fused


def test_bfloat16(fused_target: Maker) -> None:
    target = fused_target(known("Qwen3").build().bfloat16())
    assert target.fused is not None, target.why_not_fused


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Cohere", {}, "norms|layout"),
        ("Mixtral", {}, "down_proj"),
        ("Granite", {"residual_multiplier": 0.5}, "logits differ"),
        ("SmolLM3", {}, "logits differ"),
        ("GPT-2", {}, "head|norm"),
    ],
)
def test_another_model_keeps_the_stock_kernels(
    name: str, options: dict[str, Any], reason: str, fused_target: Maker
) -> None:
    target = fused_target(half(known(name), **options))
    assert target.fused is None
    assert re.search(reason, target.why_not_fused), target.why_not_fused


def test_float32_keeps_the_stock_kernels(fused_target: Maker) -> None:
    target = fused_target(known(LLAMA).build())
    assert target.fused is None
    assert target.why_not_fused == "not in half precision"


def test_methods_have_the_tokens_of_plain_decoding(fused_target: Maker) -> None:
    target = fused_target(half(known(LLAMA)))
    hybrid = drafter_for("hybrid", target, budget="fixed", num_nodes=7)
    plain, *others = (
        generate(target, drafter, PROMPT, max_new_tokens=9).token_ids
        for drafter in (drafter_for("vanilla", target), hybrid)
    )
    assert others == [plain]


@torch.inference_mode()
def test_texts_of_a_batch_have_the_bits_they_have_alone(fused_target: Maker) -> None:
    target = fused_target(half(known("Gemma 3 text")))
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:]]
    trees = [DraftTree.chain([prompt[-1], 5, 6]) for prompt in prompts]
    alone = []
    passes = target.slot_passes(len(prompts))
    caches = [passes.new_cache(64) for _ in prompts]
    for prompt, tree, cache in zip(prompts, trees, caches, strict=True):
        own = target.new_cache(64)
        for _ in target.prefill(prompt, own, with_logits=False):
            pass
        cache.copy_rows(own, own.length)
        alone.append(target.forward(tree, own).clone())
    together = passes.forward(trees, caches).logits
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_weights_are_merged_without_a_copy(fused_target: Maker) -> None:
    model = half(known(LLAMA))
    ids = torch.tensor([PROMPT])
    before = model(ids).logits
    fused_target(model)
    assert torch.equal(model(ids).logits, before)
    attention = model.model.layers[0].self_attn
    storages = {
        getattr(attention, name).weight.untyped_storage().data_ptr()
        for name in ("q_proj", "k_proj", "v_proj")
    }
    assert len(storages) == 1


def test_other_weights_are_noticed(fused_target: Maker) -> None:
    target = fused_target(half(known(LLAMA)))
    self_test(target)
    tree = DraftTree.chain([1, 2, 3])
    before = logits_after(target, tree)
    projection = target.model.model.layers[0].self_attn.k_proj
    projection.weight.data = projection.weight.data.roll(1, 0).clone()
    target.check_model()
    after = logits_after(target, tree)
    assert error_of(after, before) > 0.01
    assert error_of(after, logits_after(TargetModel(target.model, False), tree)) < 0.01


def test_hidden_states_are_left(fused_target: Maker) -> None:
    model = half(known("Qwen2"))
    found = []
    for target in (fused_target(model), TargetModel(model, use_kernels=False)):
        states = target.hidden_states((1, FINAL))
        with states.captured():
            logits_after(target, DraftTree.chain([1, 2, 3]))
            found.append(states.take(3).float())
    assert error_of(found[0], found[1]) < 0.01


def test_a_deep_tree_is_read_by_the_stock_model(fused_target: Maker) -> None:
    target = fused_target(half(known(LLAMA)))
    fused = target.fused
    assert fused is not None
    trunk = tuple(range(-1, 19))
    assert fused.takes(TreeTopology.chain(40), 7)
    # A branch off the end of a trunk whose nodes come first, and the same with a node before them.
    assert fused.takes(TreeTopology.from_parents((*trunk, 18, 18)), 7)
    deep = TreeTopology.from_parents((-1, 0, 0, *range(2, 20)))
    assert not fused.takes(deep, 7)
    tree = DraftTree(torch.arange(2, 2 + deep.num_nodes), deep)
    stock = logits_after(TargetModel(target.model, use_kernels=False), tree)
    assert error_of(logits_after(target, tree), stock) < 1e-3
    assert not fused.takes(TreeTopology.chain(2), fused.decoder.num_positions - 1)
