"""Where drafting loses, steps are plain for a while; where it wins, nearly none is.

Run: pytest tests/model/budget/test_switch.py
"""

from __future__ import annotations

import random

import pytest

from model.budget.switch import CREDIT, LONGEST_REST, REST, Pace


def shares(saved: list[float]) -> tuple[float, float]:
    """Return the share of plain steps, and plain steps saved by each step, where drafting saves so
    much in turn.
    """
    pace, num_plain, total = Pace(), 0, 0.0
    for amount in saved:
        if pace.is_resting:
            num_plain += 1
            pace.rest()
        else:
            total += amount
            pace.learn(amount)
    return num_plain / len(saved), total / len(saved)


@pytest.mark.parametrize("loss", [0.08, 0.3])
def test_what_never_pays_costs_less_than_three_percent(loss: float) -> None:
    source = random.Random(0)
    plain, saved = shares([source.gauss(-loss, 0.5) for _ in range(5000)])
    assert plain > 0.5
    assert saved > -0.03


def test_what_pays_goes_on() -> None:
    source = random.Random(0)
    plain, saved = shares([source.gauss(0.4, 0.9) for _ in range(5000)])
    assert plain < 0.025, "one in 64 shows the price again"
    assert saved > 0.37


def test_after_a_rest_what_pays_again_is_found_again() -> None:
    pace = Pace()
    for _ in range(2000):
        pace.rest() if pace.is_resting else pace.learn(-0.5)
    num_plain = 0
    for _ in range(LONGEST_REST + 200):
        num_plain += pace.is_resting
        pace.rest() if pace.is_resting else pace.learn(0.5)
    assert num_plain <= LONGEST_REST
    pace.learn(-2 * CREDIT)
    num_plain = 0
    while pace.is_resting:
        num_plain += 1
        pace.rest()
    assert num_plain == REST, "rests begin short again"
