"""STAND averages what the model said, fills its tree from the longest contexts, and draws when texts are drawn.

Run: pytest tests/model/methods/stand/test_drafter.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.drafter import VerifiedStep
from model.engine.loop import generate
from model.engine.rules import SamplingRule, sampling_processors
from model.engine.tree import DraftTree
from model.engine.verification import verify
from model.methods.stand.drafter import NgramRows, StandConfig, StandDrafter
from tests.model.decoded import random_ids, target_of

CPU = torch.device("cpu")
ROOMY = DraftBudget(max_depth=24)


def test_rows_are_averages_of_which_the_likeliest_stay() -> None:
    # The example of the paper's figure 3.
    rows = NgramRows(longest=2, k=4, most=100)
    rows.write([1, 2], {10: 0.7, 11: 0.2, 12: 0.05})
    rows.write([1, 2], {10: 0.3, 11: 0.6, 13: 0.05})
    assert rows.after([1, 2]) == pytest.approx({10: 0.5, 11: 0.4, 12: 0.025, 13: 0.025})
    assert [*rows.after([1, 2])][:2] == [10, 11]
    rows.write([3, 2], {14: 0.9})
    assert rows.after([9, 2]) == pytest.approx(
        {10: 1 / 3, 14: 0.3, 11: 0.8 / 3, 12: 0.05 / 3}, abs=1e-6
    ), "the row of the last token alone holds all three, and the four likeliest"
    assert rows.after([3, 2]) == {14: 0.9}, "the longest context"
    assert rows.after([4]) == {}


def test_the_rows_written_longest_ago_make_room_and_all_is_saved() -> None:
    rows = NgramRows(longest=2, k=2, most=3)
    for text in ([1, 2], [3, 4]):
        rows.write(text, {5: 0.5, 6: 0.25})
    assert rows.after([9, 2]) == {} and rows.after([1, 2]) != {}
    other = NgramRows(longest=2, k=2, most=3)
    other.load_state(rows.state(), vocab_size=10)
    assert other.state()["tokens"].tolist() == rows.state()["tokens"].tolist()
    assert other.after([3, 4]) == rows.after([3, 4]) == {5: 0.5, 6: 0.25}
    wrong: dict[str, Any] = {
        "tokens": torch.full((3, 4), 10, dtype=torch.int32),
        "counts": torch.zeros(3, dtype=torch.int32),
        "probabilities": torch.full((3, 2), 1.5),
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match="matrix: holds "):
            other.load_state(rows.state() | {name: value}, vocab_size=10)
    with pytest.raises(ValueError, match="matrix: got tensors"):
        other.load_state({}, vocab_size=10)


def drafter_of(folder: Path, paths: list[list[int]], **options: Any) -> StandDrafter:
    file = folder / "tree.json"
    file.write_text(json.dumps(paths))
    return StandDrafter(StandConfig(tree_version=str(file), **options), 20, CPU)


def taught(drafter: StandDrafter, prompt: list[int], logits: torch.Tensor) -> None:
    """Let a drafter see one verified step of the root alone after a prompt, with these logits [V]."""
    drafter.start(prompt)
    tree = DraftTree.chain(prompt[-1:])
    acceptance = verify(tree, logits[None], num_candidates=drafter.needs.num_candidates)
    drafter.observe(VerifiedStep(tree, acceptance, None))


PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0]]


def test_greedy_drafts_are_the_likeliest_tokens(tmp_path: Path) -> None:
    drafter = drafter_of(tmp_path, PATHS, row_tokens=4)
    logits = torch.zeros(20)
    logits[[7, 8, 9]] = torch.tensor([6.0, 5.0, 4.0])
    taught(drafter, [1, 2], logits)  # 7 follows
    logits[[3, 4]] = torch.tensor([9.0, 8.0])
    taught(drafter, [2, 7], logits)
    drafter.start([5, 1, 2])
    tree = drafter.propose([5, 1, 2], ROOMY)
    assert tree.token_ids.tolist() == [2, 7, 8, 9, 3, 4]
    assert tree.topology.parents == (-1, 0, 0, 0, 1, 1), "nothing is known after 8"
    assert tree.drawn is None
    chain = drafter.propose([5, 1, 2], DraftBudget(max_depth=1, chain_only=True))
    assert chain.token_ids.tolist() == [2, 7]
    drafter.reset()
    assert drafter.propose([5, 1, 2], ROOMY).token_ids.tolist() == [2]


def test_drafts_of_sampling_are_drawn_from_the_rows_and_say_so(tmp_path: Path) -> None:
    drafter = drafter_of(tmp_path, PATHS, row_tokens=4)
    logits = torch.full((20,), -20.0)
    logits[[7, 8, 9]] = torch.tensor([0.5, 0.3, 0.2]).log()
    taught(drafter, [1, 2], logits)
    rule = SamplingRule(sampling_processors(0.5, 0, 1.0), torch.Generator().manual_seed(2))
    budget = DraftBudget(max_depth=24, sampling=rule)
    firsts: Counter[int] = Counter()
    for _ in range(600):
        tree = drafter.propose([1, 2], budget)
        assert tree.drawn is not None
        drawn = dict(zip(*tree.drawn[0], strict=True))
        firsts[int(tree.token_ids[1])] += 1
        assert len(set(tree.token_ids.tolist())) == tree.topology.num_nodes == 4
    squares = {7: 0.25 / 0.38, 8: 0.09 / 0.38, 9: 0.04 / 0.38}
    assert {token: drawn[token] for token in squares} == pytest.approx(squares, abs=0.02)
    assert sum(drawn.values()) == pytest.approx(1.0)
    for token, share in squares.items():
        assert firsts[token] / 600 == pytest.approx(share, abs=0.06)


def test_drawn_drafts_are_accepted_more_often_than_likely_ones(tmp_path: Path) -> None:
    """At a high temperature a draw rarely hits a guess; a draw from the same distribution is mostly accepted."""
    target, prompt = target_of("Llama, grouped heads"), random_ids(9)
    paths = [[0] * length for length in range(1, 4)]
    steps = {}
    for draws in (True, False):
        drafter = drafter_of(tmp_path, paths, row_tokens=20)
        if not draws:
            drafter.propose = lambda context, budget, drafter=drafter: StandDrafter.propose(  # type: ignore[method-assign, misc]
                drafter, context, DraftBudget(budget.max_depth, budget.chain_only)
            )
        rule = SamplingRule(sampling_processors(1.0, 0, 1.0), torch.Generator().manual_seed(3))
        answers = [
            generate(target, drafter, prompt, max_new_tokens=40, rule=rule) for _ in range(12)
        ]
        steps[draws] = sum(len(answer.steps) for answer in answers)
    assert steps[True] < steps[False], steps


def test_of_a_tree_of_ones_own_the_shape_counts(tmp_path: Path) -> None:
    drafter = drafter_of(tmp_path, [[0], [2], [2, 1]], row_tokens=4)
    taught(drafter, [1, 2], torch.arange(20.0))
    tree = drafter.propose([1, 2], ROOMY)
    assert tree.token_ids.tolist() == [2, 19, 18], (
        "children have the likeliest tokens, whatever their ranks"
    )
    with pytest.raises(ValueError, match=r"tree_version: got nowhere\.json; allowed: the path"):
        StandConfig(tree_version="nowhere.json")
    assert StandConfig().template().topology.num_nodes == 81
