"""Counts of steps are what a walk over every node gives, and the figures read off them add up.

Run: pytest tests/evaluation/answers/test_step_figures.py
"""

from __future__ import annotations

import math

import pytest
import torch

from evaluation.answers.step_figures import (
    PARTS,
    acceptance_rate,
    node_counts,
    source_counts,
    time_shares,
)
from evaluation.inference.method import step_counts
from model.engine.loop import generate
from model.engine.step import StepRecord
from model.engine.tree import DraftTree
from tests.evaluation.answers.answer_rows import answer_rows, make_row
from tests.model.decoded import drafter_for, random_ids, target_of

CPU = torch.device("cpu")
# Root 0 with children 1, 2, 3; children 4, 5 of node 2; child 6 of node 5.
PARENTS = (-1, 0, 0, 0, 2, 2, 5)


def _step(path: list[int], num_tokens: int, sources: tuple[str, ...] | None = None) -> StepRecord:
    tree = DraftTree.from_lists(list(range(7)), PARENTS)
    tree = DraftTree(tree.token_ids, tree.topology, sources)
    times = range(1, 1 + len(PARTS))
    return StepRecord([9] * num_tokens, tree, path, None, 0, *(10**9 * time for time in times))


def test_counts_of_a_hand_made_tree() -> None:
    chain = StepRecord([9, 9], DraftTree.chain([1, 2]), [0, 1])
    sources = ("", "a", "a", "b", "a", "b", "b")
    details = step_counts([_step([0, 2, 5], 3, sources), _step([0], 1, sources), chain])
    assert details == {
        "draft_tokens": 13,
        "drafted": [[3, 2, 2], [2, 2], [2]],
        "accepted": [[1, 1, 0], [0, 1], [0]],
        "sources": {"a": [6, 1], "b": [6, 1]},
        "step_nodes": [6, 6, 1],
        "step_times": {part: 2.0 * time for time, part in enumerate(PARTS, start=1)},
    }


def test_nodes_past_the_last_visible_token_are_not_accepted() -> None:
    ended = step_counts([_step([0, 2, 5, 6], 3)])  # the text ends on a drafted token
    assert ended["accepted"] == [[0, 1, 0], [0, 1], [1]]
    cut = step_counts([_step([0, 2, 5, 6], 2)])  # two tokens stand past the limit
    assert cut["accepted"] == [[0, 1, 0], [0, 1], [0]]
    assert cut["sources"] == {}


@pytest.mark.parametrize("method", ["vanilla", "recycling", "pld", "lookahead"])
def test_counts_of_a_real_answer_add_up(method: str) -> None:
    target = target_of("Llama, grouped heads")
    done = generate(target, drafter_for(method, target), random_ids(9), max_new_tokens=40)
    details = step_counts(done.steps)
    num_accepted = sum(map(sum, details["accepted"]))
    # Every step but perhaps the last adds one token that no node guessed.
    assert num_accepted - (len(done.token_ids) - len(done.steps)) in (0, 1)
    assert sum(map(sum, details["drafted"])) == details["draft_tokens"]
    assert details["draft_tokens"] == sum(step.num_nodes - 1 for step in done.steps)
    for step in done.steps:
        for node, token in zip(step.accepted_nodes, step.tokens, strict=False):
            assert int(step.tree.token_ids[node]) == token
    assert (num_accepted > 0) == (method != "vanilla"), "a test in which nothing is accepted"


def test_figures_over_turns_choices_and_rows() -> None:
    seconds = dict.fromkeys(PARTS, 0.0) | {"forward": 3.0, "draft": 1.0}
    turn = {"drafted": [[3, 1], [2]], "accepted": [[2, 0], [1]], "sources": {"a": [4, 3]}}
    keys = {name: [value, value] for name, value in turn.items()} | {"step_times": [seconds] * 2}
    row = make_row(1, "qa", [2], 1.0, **keys)
    row["choices"].append(row["choices"][0])
    rows = answer_rows([row, make_row(2, "qa", [2], 1.0)])
    foreign = rows[1]
    assert node_counts(rows).to_numpy().tolist() == [[1, 0, 12, 8], [1, 1, 4, 0], [2, 0, 8, 4]]
    assert acceptance_rate(rows) == pytest.approx(12 / 24)
    assert source_counts(rows).loc["a"].tolist() == [16, 12]
    assert time_shares(rows) == seconds | {"forward": 0.75, "draft": 0.25}
    assert node_counts([foreign]).empty and source_counts([foreign]).empty
    assert time_shares([foreign]) == {} and math.isnan(acceptance_rate([foreign]))
