"""Drafters offer nodes, the likeliest first, and any number of them is a tree.

Of the offers of all texts that share a pass, the likeliest nodes are drafted.

Run: pytest tests/model/methods/test_offers.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from model.budget.paced import CostAwareDrafter
from model.engine.budget import DraftBudget
from model.engine.drafter import Drafter, VerifiedStep
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.engine.verification import verify
from tests.model.decoded import drafter_for, random_ids, referee, target_of

LLAMA = "Llama, grouped heads"
# Of every method that offers: options with which it chooses its number of nodes.
AUTOMATIC = [
    ("hybrid", {}),
    ("hybrid", {"neighbours": 0, "num_nodes": 5}),
    ("recycling", {"tree_version": "auto"}),
    ("recycling", {"tree_version": "auto", "policy": "accepted-last", "output_id_topk": 2}),
    ("pld", {"budget": "auto"}),
    ("samd", {"budget": "auto", "threshold": 2}),
    ("samd", {"budget": "auto", "fallback": "none"}),
]
MOST = 12


def automatic(method: str, options: dict[str, Any]) -> CostAwareDrafter:
    """Return a drafter that chooses its number of nodes."""
    drafter = drafter_for(method, target_of(LLAMA), **options)
    assert isinstance(drafter, CostAwareDrafter) and drafter.wants_costs
    return drafter


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return the paths of tokens to all nodes."""
    tokens, topology = tree.token_ids.tolist(), tree.topology
    return {
        tuple(tokens[each] for each in topology.path_to(node)) for node in range(topology.num_nodes)
    }


def equal(first: DraftTree, second: DraftTree) -> bool:
    """Whether trees have the same nodes in the same order, from the same sources."""
    tokens = [tree.token_ids.tolist() for tree in (first, second)]
    return (
        tokens[0] == tokens[1]
        and first.topology is second.topology
        and first.sources == second.sources
    )


class Offering(Drafter):
    """Lets a drafter offer, checks all that may be taken, and takes a part."""

    def __init__(self, drafter: CostAwareDrafter, seed: int | None) -> None:
        super().__init__(drafter.config, drafter.vocab_size, drafter.device)
        self.max_nodes, self.needs = drafter.max_nodes, drafter.needs
        self._drafter = drafter
        self._source = None if seed is None else random.Random(seed)  # None: all is taken
        self.sizes: list[int] = []

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._drafter.start(prompt_ids)

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        self._drafter.observe_prompt(token_ids, logits)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        drafter, source = self._drafter, self._source
        most = drafter.max_nodes - 1
        if source:
            most = min(source.randrange(MOST), most)
            depth, is_chain = min(source.randrange(6), budget.max_depth), source.random() < 0.2
            budget = DraftBudget(depth, chain_only=is_chain)
        gains = drafter.offer(context, budget, most)
        assert gains is not None and len(gains) <= most
        self.sizes.append(len(gains))
        assert all(0.0 <= gain <= 1.0 for gain in gains)
        assert list(gains) == sorted(gains, reverse=True)
        if source:
            self._check(context, budget, gains)
            again = drafter.offer(context, budget, most)
            assert again is not None and list(again) == list(gains)
        return drafter.take(source.randint(0, len(gains)) if source else len(gains))

    def _check(self, context: Sequence[int], budget: DraftBudget, gains: Sequence[float]) -> None:
        """Check every number of nodes that may be taken, and a least probability."""
        before = {(context[-1],)}
        for count in range(len(gains) + 1):
            tree = self._drafter.take(count)
            tree.topology.check(budget.max_depth, budget.chain_only, self._drafter.max_nodes)
            assert tree.topology.num_nodes == 1 + count
            assert int(tree.token_ids[0]) == context[-1]
            assert before <= paths(tree), "one more node than before"
            before = paths(tree)
        if gains:
            least = gains[len(gains) // 2]
            likely = self._drafter.offer(context, budget, len(gains), least)
            assert likely is not None and list(likely) == [gain for gain in gains if gain >= least]

    def observe(self, step: VerifiedStep) -> None:
        self._drafter.observe(step)


@pytest.mark.parametrize(("method", "options"), AUTOMATIC)
def test_every_number_of_offered_nodes_is_a_tree(method: str, options: dict[str, Any]) -> None:
    target, drafter = target_of(LLAMA), automatic(method, options)
    sizes = []
    for seed in range(3):
        prompt = [*random_ids(9, seed // 2), *random_ids(9, seed // 2)]  # the last one is new
        offering = Offering(drafter, seed)
        found = generate(target, offering, prompt, max_new_tokens=40)
        assert found.token_ids == referee(target, prompt, 40)
        sizes += offering.sizes
    assert max(sizes) >= 2 and min(sizes) == 0


@pytest.mark.parametrize(("method", "options"), AUTOMATIC)
def test_all_that_is_offered_is_what_is_proposed_without_costs(
    method: str, options: dict[str, Any]
) -> None:
    target = target_of(LLAMA)
    taking, proposing = automatic(method, options), automatic(method, options)
    for seed in (0, 1, 0):
        prompt = random_ids(3, seed) * 3
        taken = generate(target, Offering(taking, None), prompt, max_new_tokens=30)
        # Not paced: `decode` gives it no costs.
        proposing.wants_costs = False
        proposed = generate(target, proposing, prompt, max_new_tokens=30)
        pairs = zip(taken.steps, proposed.steps, strict=True)
        assert all(equal(first.tree, second.tree) for first, second in pairs)
        assert taken.token_ids == proposed.token_ids
        assert max(step.num_nodes for step in taken.steps) > 1
    memory, other = taking.memory(), proposing.memory()
    assert all(torch.equal(memory[name], other[name]) for name in memory), "learned the same"


def test_a_chain_that_stops_being_right_is_offered_with_less() -> None:
    drafter = automatic("pld", {"budget": "auto", "num_pred_tokens": 4})
    text = random_ids(8, 5) * 2
    drafter.start(text)
    first = drafter.offer(text, DraftBudget(9), 4)
    wrong = (text[8] + 1) % drafter.vocab_size
    for _ in range(5):
        drafter.start(text)
        assert drafter.offer(text, DraftBudget(9), 4)
        drafter.observe(rejecting(drafter.take(0), wrong))
    drafter.start(text)
    later = drafter.offer(text, DraftBudget(9), 4)
    assert first and later and later[0] < first[0]
    assert drafter.take(4).token_ids.tolist() == [text[-1], *text[:4]]


def rejecting(tree: DraftTree, token: int) -> VerifiedStep:
    """Return a step in which the model says this token after every node."""
    logits = torch.zeros(tree.topology.num_nodes, target_of(LLAMA).vocab_size)
    logits[:, token] = 1.0
    return VerifiedStep(tree, verify(tree, logits), None)


@pytest.mark.parametrize(
    ("method", "options"), [("hybrid", {}), ("recycling", {"tree_version": "auto"})]
)
def test_more_than_was_offered_cannot_be_taken(method: str, options: dict[str, Any]) -> None:
    drafter = automatic(method, options)
    drafter.start([3, 4, 3])
    offered = drafter.offer([3, 4, 3], DraftBudget(9), 5)
    assert offered is not None
    for count in (-1, len(offered) + 1):
        with pytest.raises(ValueError, match=f"got {count} nodes; allowed: 0 to {len(offered)}"):
            drafter.take(count)
    drafter.propose([3, 4, 3], DraftBudget(9))
    with pytest.raises(ValueError, match="got 1 nodes; allowed: 0 to 0"):
        drafter.take(1)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("recycling", {}),
        ("lookahead", {"budget": "auto"}),
        ("sps", {"budget": "auto"}),
        ("samd", {"tree_version": "2.2.2"}),
    ],
)
def test_drafters_without_probabilities_say_so(method: str, options: dict[str, Any]) -> None:
    drafter = drafter_for(method, target_of(LLAMA), **options)
    assert isinstance(drafter, CostAwareDrafter)
    drafter.start([3, 4, 5])
    assert drafter.offer([3, 4, 5], DraftBudget(9), 5) is None


def test_samd_offers_the_fallbacks_tree_and_drafts_fixed_chains_whole() -> None:
    drafter = automatic("samd", {"tree_version": "auto", "threshold": 2})
    text = random_ids(8, 5) * 2
    drafter.start(text)
    assert drafter.offer(text, DraftBudget(9), 5) is None, "the budget of its chains is fixed"
    assert drafter.propose(text, DraftBudget(3)).token_ids.tolist() == [text[-1], *text[:3]]
    short = random_ids(8, 5)
    drafter.start(short)
    drafter.observe_prompt(short, torch.randn(8, drafter.vocab_size))
    assert drafter.offer(short, DraftBudget(9), 5)
    assert drafter.take(2).sources == ("recycling",) * 3


def test_recycling_offers_nothing_after_a_token_without_a_row() -> None:
    drafter = automatic("recycling", {"tree_version": "auto"})
    text = [3, 4, drafter.vocab_size]
    drafter.start(text)
    assert list(drafter.offer(text, DraftBudget(9), 5) or ()) == []
    assert drafter.take(0).token_ids.tolist() == text[-1:]
