"""EAGLE's drafters keep the rows of the text as a fresh reading has them, and texts those of plain decoding.

Run: pytest tests/model/methods/heads/eagle/test_drafter.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from model.backends import target as target_module
from model.backends.target import TargetModel
from model.engine.budget import DraftBudget
from model.engine.drafter import Drafter
from model.engine.loop import generate
from model.engine.rules import SamplingRule, sampling_processors
from model.engine.tree import DraftTree
from model.methods import drafter_class
from model.methods.heads.eagle.drafter import (
    Eagle2Config,
    Eagle3Config,
    EagleConfig,
    NetworkDrafter,
)
from tests.model.decoded import random_ids, referee, target_of
from tests.model.families.family import VOCAB, Family
from tests.model.methods.heads.eagle.tiny_heads import (
    config_of,
    eagle3_tensors,
    eagle_tensors,
    write,
    write_heads,
)

LLAMA = "Llama, grouped heads"
METHODS = ("eagle", "eagle2", "eagle3")
PROMPT = random_ids(20, seed=1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random heads of each method."""
    folder = tmp_path_factory.mktemp("heads")
    return {method: write_heads(folder / method, method, VOCAB) for method in METHODS}


def drafter_of(method: str, heads: str, target: TargetModel, **options: Any) -> NetworkDrafter:
    """A drafter that was checked against its target."""
    cls = drafter_class(method)
    drafter = cls(cls.config_class(heads=heads, **options), target.vocab_size, target.device)
    drafter.check_target(target)
    assert isinstance(drafter, NetworkDrafter)
    return drafter


def drafts_of(drafter: Drafter) -> list[tuple[list[int], DraftBudget, DraftTree]]:
    """All later drafts of a drafter, as they come, with their texts."""
    drafts: list[tuple[list[int], DraftBudget, DraftTree]] = []
    propose = drafter.propose

    def noted(context: Sequence[int], budget: DraftBudget) -> DraftTree:
        tree = propose(context, budget)
        drafts.append((list(context), budget, tree))
        return tree

    drafter.propose = noted  # type: ignore[method-assign]
    return drafts


@torch.inference_mode()
def states_of(target: TargetModel, text: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """Transformers' own hidden states of a text but its last token."""
    output = target.model(torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[layer][0] for layer in layers], dim=-1)


@pytest.mark.parametrize("chunk", [7, 2048])
@pytest.mark.parametrize("method", METHODS)
def test_every_draft_is_that_of_the_text_read_afresh(
    method: str, chunk: int, heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are not read again, or drafted ones that stay, would change drafts, and never the text."""
    monkeypatch.setattr(target_module, "PREFILL_CHUNK", chunk)
    monkeypatch.setattr(target_module, "MAX_LOGITS", 512)
    target = target_of(LLAMA)
    drafter = drafter_of(method, heads[method], target)
    drafts = drafts_of(drafter)
    answer = generate(target, drafter, PROMPT, max_new_tokens=40)
    assert answer.token_ids == referee(target, PROMPT, 40)
    lengths = set(answer.accept_lengths)
    assert 1 in lengths and max(lengths) > 1, "some guesses right, some wrong"
    assert len(drafts) == len(answer.steps)
    fresh = drafter_of(method, heads[method], target)
    for text, budget, tree in drafts:
        fresh.start(text)
        fresh.observe_prompt_hidden(text[:-1], states_of(target, text, fresh.needs.hidden_layers))
        again = fresh.propose(text, budget)
        assert again.token_ids.tolist() == tree.token_ids.tolist()
        assert again.topology is tree.topology
        assert tree.topology.num_nodes == drafter.max_nodes


@pytest.mark.parametrize("method", METHODS)
def test_a_second_text_knows_nothing_of_the_first(method: str, heads: dict[str, str]) -> None:
    target = target_of(LLAMA)
    drafter = drafter_of(method, heads[method], target)
    first = generate(target, drafter, PROMPT, max_new_tokens=20)
    generate(target, drafter, random_ids(33, seed=9), max_new_tokens=20)
    again = generate(target, drafter, PROMPT, max_new_tokens=20)
    assert again.accept_lengths == first.accept_lengths
    trees = ([step.tree.token_ids.tolist() for step in one.steps] for one in (first, again))
    assert next(trees) == next(trees)


@pytest.mark.parametrize("method", METHODS)
def test_sampled_text_is_that_of_plain_decoding(method: str, heads: dict[str, str]) -> None:
    target = target_of(LLAMA)

    def sampled(drafter: Drafter) -> list[int]:
        generator = torch.Generator().manual_seed(3)
        rule = SamplingRule(sampling_processors(1.0, 0, 1.0), generator)
        return generate(target, drafter, PROMPT, max_new_tokens=30, rule=rule).token_ids

    vanilla = drafter_class("vanilla")
    plain = vanilla(vanilla.config_class(), target.vocab_size, target.device)
    assert sampled(drafter_of(method, heads[method], target)) == sampled(plain)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prompt_length", [1, 2])
def test_short_prompts(method: str, prompt_length: int, heads: dict[str, str]) -> None:
    """Before the only token of a prompt there are no hidden states, so that nothing is drafted."""
    target, prompt = target_of(LLAMA), PROMPT[:prompt_length]
    answer = generate(target, drafter_of(method, heads[method], target), prompt, max_new_tokens=20)
    assert answer.token_ids == referee(target, prompt, 20)
    assert (answer.steps[0].num_nodes == 1) == (prompt_length == 1)
    assert answer.steps[1].num_nodes > 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("chain_only", [False, True])
def test_drafts_stay_in_their_budget(
    method: str, depth: int, chain_only: bool, heads: dict[str, str]
) -> None:
    target = target_of(LLAMA)
    drafter = drafter_of(method, heads[method], target)
    drafter.start(PROMPT)
    drafter.observe_prompt_hidden(
        PROMPT[:-1], states_of(target, PROMPT, drafter.needs.hidden_layers)
    )
    budget = DraftBudget(depth, chain_only)
    topology = drafter.propose(PROMPT, budget).topology
    topology.check(budget.max_depth, budget.chain_only, drafter.max_nodes)
    # Flat probabilities make broad trees; chains go as deep as they may.
    assert topology.max_depth == depth if chain_only or depth < 2 else topology.max_depth > 1
    if depth and not chain_only:
        assert len(topology.levels[1]) > 1


@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_nodes_is_that_of_the_option(method: str, heads: dict[str, str]) -> None:
    target = target_of(LLAMA)
    drafter = drafter_of(method, heads[method], target, num_nodes=9)
    answer = generate(target, drafter, PROMPT, max_new_tokens=20)
    assert {step.num_nodes for step in answer.steps} == {10}


def test_eagle3_reads_low_middle_and_high_layers(tmp_path: Path) -> None:
    """Those of the authors' modeling_llama_kv.py: 2, half of all, and the third from the end."""
    name = write(tmp_path, config_of(VOCAB, draft_vocab_size=20), eagle3_tensors(VOCAB, 20))
    cls = drafter_class("eagle3")
    drafter = cls(Eagle3Config(heads=name), VOCAB, CPU)
    deep = Family("deep", "LlamaConfig", {"num_hidden_layers": 8}).build()
    drafter.check_config(deep.config)
    assert drafter.needs.hidden_layers == (2, 4, 5)
    with pytest.raises(
        ValueError, match=r"read the inputs of layers 2, 1, -1; allowed: 3 of 0 to 1"
    ):
        drafter.check_config(target_of(LLAMA).config)


@pytest.mark.parametrize("method", METHODS)
def test_heads_of_another_model_are_refused(method: str, tmp_path: Path) -> None:
    cls, target = drafter_class(method), target_of(LLAMA)
    name = write_heads(tmp_path / "other", method, VOCAB + 2)
    with pytest.raises(ValueError, match=f"vocabulary of {VOCAB + 2} tokens; allowed: {VOCAB}"):
        cls(cls.config_class(heads=name), VOCAB, CPU)
    drafter = cls(cls.config_class(heads=name), VOCAB + 2, CPU)
    wide = Family("wide", "LlamaConfig", {"hidden_size": 64, "head_dim": 16}).build()
    with pytest.raises(ValueError, match="hidden size of 64; allowed: 32"):
        drafter.check_config(wide.config)
    tensors = eagle3_tensors(VOCAB, 20) if method == "eagle3" else eagle_tensors()
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, 32)
    more = {"draft_vocab_size": 20, "hidden_layers": [0, 1, 1]} if method == "eagle3" else {}
    name = write(tmp_path / "same", config_of(VOCAB, **more), tensors)
    with pytest.raises(ValueError, match="trained for another model"):
        drafter_of(method, name, target)


@pytest.mark.parametrize("method", METHODS)
def test_heads_are_asked_for(method: str) -> None:
    cls = drafter_class(method)
    with pytest.raises(ValueError, match="heads: got none; give the folder"):
        cls(cls.config_class(), VOCAB, CPU)


def drafter_class_of(config_class: Any) -> type[Drafter]:
    """The drafter with these options."""
    return next(cls for cls in map(drafter_class, METHODS) if cls.config_class is config_class)


@pytest.mark.parametrize(
    ("config_class", "options", "text"),
    [
        (EagleConfig, {"num_nodes": 26}, "num_nodes: got 26; allowed: 1 to 25"),
        (
            Eagle2Config,
            {"width": 3},
            "num_nodes: got 59; allowed: 1 to 48, the candidates of 6 levels",
        ),
        (Eagle3Config, {"depth": 0}, "depth: got 0; allowed: 1 to 64"),
    ],
)
def test_wrong_options_are_named(config_class: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        drafter_class_of(config_class)(config_class(**options), VOCAB, CPU)
