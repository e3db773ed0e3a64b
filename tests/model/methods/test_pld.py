"""Prompt lookup proposes what a slow search through the text finds.

Run: pytest tests/model/methods/test_pld.py
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from model.engine.budget import CostCurve, DraftBudget
from model.engine.drafter import VerifiedStep
from model.engine.read_out import Candidates
from model.engine.tree import DraftTree
from model.engine.verification import Acceptance
from model.methods.pld.drafter import PldConfig, PldDrafter

CPU = torch.device("cpu")


def slow_search(text: list[int], max_size: int, length: int, match: str) -> list[int]:
    """Return the continuation of the longest suffix that is found earlier in the text."""
    for size in range(min(max_size, len(text) - 1), 0, -1):
        ends = [
            end
            for end in range(size, len(text))
            if text[end - size : end] == text[len(text) - size :]
        ]
        if ends:
            end = ends[0] if match == "first" else ends[-1]
            return text[end : end + length]
    return []


def drafter(**options: Any) -> PldDrafter:
    """Return a drafter."""
    return PldDrafter(PldConfig(**options), 100, CPU)


def emit(pld: PldDrafter, tokens: list[int]) -> None:
    """Let a drafter observe a step that emitted these tokens."""
    path = list(range(len(tokens)))
    acceptance = Acceptance(path, tokens, [0], [0], Candidates([[0, 0]], [[0.0, 0.0]]))
    pld.observe(VerifiedStep(DraftTree.chain([0]), acceptance, None))


@pytest.mark.parametrize("match", ["first", "latest"])
@pytest.mark.parametrize("seed", range(30))
def test_drafts_equal_a_slow_search(seed: int, match: str) -> None:
    source = random.Random(seed)
    size, length = source.choice([1, 2, 3, 4]), source.choice([1, 4, 10])
    pld = drafter(max_ngram_size=size, num_pred_tokens=length, match=match)
    text = [source.randrange(4) for _ in range(source.randrange(1, 12))]
    pld.start(text)
    for _ in range(12):
        depth = source.randrange(12)
        draft = pld.propose(text, DraftBudget(depth))
        assert draft.topology.is_chain
        expected = slow_search(text, size, min(length, depth), match)
        assert draft.token_ids.tolist() == [text[-1], *expected]
        new = [source.randrange(4) for _ in range(source.randrange(1, 4))]
        emit(pld, new)
        text = text + new


def test_which_match_is_continued_is_a_choice() -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    for match, continuation in (("first", [7, 1]), ("latest", [8, 1])):
        pld = drafter(num_pred_tokens=2, match=match)
        pld.start(text)
        assert pld.propose(text, DraftBudget(9)).token_ids.tolist() == [2, *continuation]


def test_a_text_without_repetition_gives_the_root_alone() -> None:
    pld = drafter()
    for text in ([5], [5, 6, 7]):
        pld.start(text)
        assert pld.propose(text, DraftBudget(9)).token_ids.tolist() == [text[-1]]


def test_the_draft_is_never_longer_than_asked() -> None:
    pld = drafter(num_pred_tokens=3)
    pld.start([1] * 20)
    assert pld.propose([1] * 20, DraftBudget(9)).topology.num_nodes == 4 == pld.max_nodes
    assert pld.propose([1] * 20, DraftBudget(2)).topology.num_nodes == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_ngram_size": 0}, "max_ngram_size: got 0; allowed: 1 to"),
        ({"num_pred_tokens": 0}, "num_pred_tokens: got 0; allowed: 1 to"),
        ({"match": "last"}, "match: got 'last'; allowed: first, latest"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PldConfig(**options)


def test_an_automatic_budget_drafts_what_came_true_and_stops_where_nothing_does() -> None:
    steep = CostCurve((1, 2, 4, 8, 11), (1.0, 1.3, 1.6, 2.2, 2.6))
    pld = drafter(budget="auto")
    sizes = []
    for _ in range(60):
        pld.start([1, 2, 3, 4, 5, 6, 7, 8] * 3)
        sizes.append(pld.propose([8], DraftBudget(99, cost_curve=steep)).topology.num_nodes)
        emit(pld, [1, 2, 3, 4, 5, 6, 7, 8])
    assert sizes[-1] > sizes[0], "guesses came true"
    for _ in range(600):
        pld.start([1, 2, 3, 4, 5, 6, 7, 8] * 3)
        sizes.append(pld.propose([8], DraftBudget(99, cost_curve=steep)).topology.num_nodes)
        emit(pld, [90])
    assert sizes[-1] == 1, "guesses stopped coming true"
    pld.reset()
    pld.start([1, 2, 3, 4, 5, 6, 7, 8] * 3)
    assert pld.propose([8], DraftBudget(99, cost_curve=steep)).topology.num_nodes == sizes[0]
