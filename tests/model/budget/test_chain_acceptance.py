"""Chains are drafted as far as they pay.

Run: pytest tests/model/budget/test_chain_acceptance.py
"""

from __future__ import annotations

from model.budget.acceptance import ChainAcceptance
from model.engine.budget import CostCurve

CHEAP = CostCurve((1, 2, 5, 9), (1.0, 1.1, 1.15, 1.2))
DEAR = CostCurve((1, 2, 5, 9), (1.0, 3.0, 6.0, 10.0))


def test_chains_that_come_true_are_drafted_and_others_are_not() -> None:
    rates = ChainAcceptance(2, 8)
    for _ in range(200):
        rates.learn(0, [1, 2, 3, 4], [1, 2, 9])  # two right, the third wrong
        rates.learn(1, [1, 2, 3, 4], [9])
    assert rates.paying(0, 8, CHEAP) in (2, 4), "no further than the next size that was measured"
    assert rates.paying(1, 8, CHEAP) == 0
    assert rates.paying(7, 8, CHEAP) == 0, "kinds beyond the last count as the last"
    assert rates.paying(0, 8, DEAR) == 0
    rates.reset()
    assert rates.paying(1, 8, CHEAP) > 0, "before anything is known there is hope"


def test_no_more_is_drafted_than_there_is() -> None:
    rates = ChainAcceptance(1, 8)
    for _ in range(200):
        rates.learn(0, list(range(8)), list(range(9)))
    assert rates.paying(0, 8, CHEAP) == 8
    assert rates.paying(0, 3, CHEAP) == 3
    assert rates.paying(0, 0, CHEAP) == 0
