"""How many tokens are drafted, and the cost that this rests on."""

from __future__ import annotations

import numpy as np
import pytest
from token_recycling_vllm.chains import LONGEST_PAUSE, DepthChooser, StepCost


def cost_of(fixed: float, of_request: float, of_row: float) -> StepCost:
    rng, cost = np.random.default_rng(0), StepCost()
    for _ in range(400):
        requests = int(rng.integers(1, 9))
        rows = requests + int(rng.integers(0, 20))
        cost.learn(requests, rows, fixed + of_request * requests + of_row * rows)
    return cost


def test_the_cost_of_a_step_is_learned():
    cost = cost_of(40.0, 2.0, 3.0)
    assert cost.of(1, 1) == pytest.approx(45, rel=0.05)
    assert cost.of(8, 48) == pytest.approx(200, rel=0.05)


def test_a_disturbed_step_is_not_learned():
    cost = cost_of(40.0, 2.0, 3.0)
    before = cost.of(4, 10)
    cost.learn(4, 10, 5000.0)
    assert cost.of(4, 10) == before


def test_free_rows_are_drafted_and_dear_ones_only_if_likely():
    probabilities = np.array([[0.9, 0.5, 0.1], [0.3, 0.05, 0.0]])
    free, dear = DepthChooser(True), DepthChooser(True)
    free.cost = cost_of(40.0, 2.0, 0.0)
    assert free.lengths(probabilities).tolist() == [3, 2]
    dear.cost = cost_of(1.0, 0.0, 10.0)
    assert dear.lengths(np.array([[0.6, 0.5], [0.3, 0.1]])).tolist() == [0, 0]
    some = DepthChooser(True)
    some.cost = cost_of(20.0, 0.0, 10.0)
    assert some.lengths(probabilities).tolist() == [1, 0]


def test_a_guess_is_drafted_now_and_then_to_learn_what_a_row_costs():
    chooser = DepthChooser(True)
    chooser.cost = cost_of(1.0, 0.0, 10.0)
    lengths = [int(chooser.lengths(np.array([[0.2, 0.1]])).sum()) for _ in range(3 * LONGEST_PAUSE)]
    assert 2 <= sum(map(bool, lengths)) <= 3


def test_full_drafts_all_guesses():
    assert DepthChooser(False).lengths(np.array([[0.9, 0.01], [0.0, 0.0]])).tolist() == [2, 0]


def test_no_guess_is_no_draft():
    assert DepthChooser(True).lengths(np.zeros((3, 4))).tolist() == [0, 0, 0]
