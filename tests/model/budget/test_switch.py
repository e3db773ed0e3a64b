"""Where drafting loses, steps are root-only for a while; where it wins, hardly any are.

Run: pytest tests/model/budget/test_switch.py
"""

from __future__ import annotations

import random

import pytest

from model.budget.cost_model import FIRST_BALANCE, LONGEST_PAUSE, PAUSE, DraftingSwitch


def shares(saved: list[float]) -> tuple[float, float]:
    """Return the share of root-only steps, and the root-only steps saved per step, for savings that repeat."""
    switch, num_plain, total = DraftingSwitch(), 0, 0.0
    for amount in saved:
        if switch.is_paused:
            num_plain += 1
            switch.pause()
        else:
            total += amount
            switch.learn(amount)
    return num_plain / len(saved), total / len(saved)


@pytest.mark.parametrize("loss", [0.08, 0.3, 3.0, 14.0])
def test_what_never_pays_costs_less_than_three_percent(loss: float) -> None:
    source = random.Random(0)
    plain, saved = shares([source.gauss(-loss, 0.5) for _ in range(5000)])
    assert plain > 0.5
    assert saved > -0.03


def test_what_pays_goes_on() -> None:
    source = random.Random(0)
    plain, saved = shares([source.gauss(0.4, 0.9) for _ in range(5000)])
    assert plain < 0.025, "one in 64 shows the cost again"
    assert saved > 0.37


def test_after_a_rest_what_pays_again_is_found_again() -> None:
    switch = DraftingSwitch()
    for _ in range(2000):
        switch.pause() if switch.is_paused else switch.learn(-0.5)
    num_plain = 0
    for _ in range(LONGEST_PAUSE + 200):
        num_plain += switch.is_paused
        switch.pause() if switch.is_paused else switch.learn(0.5)
    assert num_plain <= LONGEST_PAUSE
    switch.learn(-FIRST_BALANCE - 1e-6)
    num_plain = 0
    while switch.is_paused:
        num_plain += 1
        switch.pause()
    assert num_plain == PAUSE, "rests begin short again"
