"""AdaPLD copies from the place with the most similar state, and branches into likely tokens.

Run: pytest tests/model/methods/test_adapld.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from model.engine.budget import DraftBudget
from model.engine.drafter import VerifiedStep
from model.engine.tree import DraftTree
from model.engine.verification import verify
from model.methods.pld.adapld import AdaPldConfig, AdaPldDrafter

CPU = torch.device("cpu")
VOCAB = 50
ROOMY = DraftBudget(max_depth=24)
# States by their direction: similar ones have similar angles.
LEFT, RIGHT, UP = [1.0, 0.0], [-1.0, 0.1], [0.0, 1.0]


def drafter_after(
    prompt: Sequence[int], states: Sequence[Sequence[float]], **options: Any
) -> AdaPldDrafter:
    """Return a drafter that has read a prompt; states are those of all its tokens but the last."""
    drafter = AdaPldDrafter(AdaPldConfig(**options), VOCAB, CPU)
    drafter.start(prompt)
    if states:
        drafter.observe_prompt_hidden(prompt[:-1], torch.tensor(states))
    return drafter


def drafted(
    drafter: AdaPldDrafter, root: int, budget: DraftBudget = ROOMY
) -> list[tuple[int, int]]:
    tree = drafter.propose([root], budget)
    return list(zip(tree.token_ids.tolist(), tree.topology.parents, strict=True))[1:]


def test_of_equal_ngrams_the_place_with_the_most_similar_state_counts() -> None:
    # 5 came after 1 and after 2, and comes now after 3.
    prompt = [1, 5, 11, 2, 5, 12, 3, 5]
    for now, expected in ((LEFT, [11, 2]), (RIGHT, [12, 3])):
        states = [LEFT, UP, UP, RIGHT, UP, UP, now]
        found = drafted(drafter_after(prompt, states, num_pred_tokens=2), 5)
        assert found == [(expected[0], 0), (expected[1], 1)]


def test_a_longer_ngram_wins_over_a_more_similar_state() -> None:
    prompt = [1, 2, 5, 11, 9, 5, 12, 2, 5]
    states = [UP, RIGHT, UP, UP, LEFT, UP, UP, LEFT]
    assert drafted(drafter_after(prompt, states, num_pred_tokens=1), 5) == [(11, 0)]


def test_where_no_ngram_is_known_the_most_similar_state_is_asked() -> None:
    # The root, 40, never came. The state before it is like that of token 2, after which 21 came, then 22.
    prompt = [1, 2, 21, 22, 3, 40]
    states = [UP, LEFT, UP, RIGHT, LEFT]
    assert drafted(drafter_after(prompt, states, num_pred_tokens=2), 40) == [(22, 0), (3, 1)]
    assert drafted(drafter_after([40], []), 40) == [], "no state comes before a single token"
    assert drafted(drafter_after([1, 40], [UP]), 40) == []


def test_likely_tokens_begin_branches_of_two() -> None:
    drafter = drafter_after([7, 30, 8, 5], [UP, UP, LEFT], num_pred_tokens=2, branches=3)
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 8, 9]] = torch.tensor([9.0, 8.0, 7.0])
    tree = DraftTree.chain([5])
    acceptance = verify(tree, logits, num_candidates=3)
    drafter.observe(VerifiedStep(tree, acceptance, None, torch.tensor([RIGHT])))
    # The text is 7 30 8 5 7 now; let it go on with 5, after which 7 8 9 were likely.
    logits[0, 5] = 10.0
    tree = DraftTree.chain([7])
    acceptance = verify(tree, logits, num_candidates=3)
    drafter.observe(VerifiedStep(tree, acceptance, None, torch.tensor([UP])))
    # The main path copies 7 5; 8 was followed by 5, 9 by nothing known.
    assert drafted(drafter, 5) == [(7, 0), (5, 1), (8, 0), (5, 3), (9, 0)]
    assert drafted(drafter, 5, DraftBudget(1)) == [(7, 0), (8, 0), (9, 0)]
    assert drafted(drafter, 5, DraftBudget(9, chain_only=True)) == [(7, 0), (5, 1)]
    assert drafted(drafter, 5, DraftBudget(0)) == []
