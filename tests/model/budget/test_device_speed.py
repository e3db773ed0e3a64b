"""The extra time of drafting is separated from the device's changing speed.

Run: pytest tests/model/budget/test_device_speed.py
"""

from __future__ import annotations

import math
import random

import pytest

from model.budget.cost_model import DeviceSpeed

EXTRA = 1.3


def followed(extra: float, num_steps: int, period: int, seed: int = 0) -> DeviceSpeed:
    """Return the filter after noisy steps on a device whose speed varies by a fifth.

    Args:
        extra: how much longer drafting steps take than the curve says.
        num_steps: number of steps.
        period: drafting steps between two root-only steps.
        seed: seed of the noise.
    """
    source, device_speed, speed = random.Random(seed), DeviceSpeed(), 0.0
    for number in range(num_steps):
        speed += -speed / 40 + source.gauss(0.0, 0.2 * math.sqrt(2 / 40))
        is_drafting = number >= 6 and number % period > 0
        taken = math.exp(speed + source.gauss(0.0, 0.05)) * (extra if is_drafting else 1.0)
        device_speed.learn(taken * (3.0 if source.random() < 0.01 else 1.0), is_drafting)
    return device_speed


@pytest.mark.parametrize("extra", [0.8, EXTRA, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_what_drafting_adds_is_found_on_a_device_whose_speed_wanders(
    extra: float, seed: int
) -> None:
    assert followed(extra, 300, 8, seed).drafting_factor == pytest.approx(extra, rel=0.08)
    assert followed(extra, 1000, 64, seed).drafting_factor == pytest.approx(extra, rel=0.15)


def test_a_device_that_changes_its_speed_changes_nothing_about_drafting() -> None:
    device_speed = followed(EXTRA, 300, 8)
    before, plain = device_speed.drafting_factor, device_speed.plain_factor
    for _ in range(100):
        device_speed.learn(2.0 * EXTRA, is_drafting=True)
    assert device_speed.plain_factor == pytest.approx(2.0, rel=0.1)
    assert plain < 1.5
    assert device_speed.drafting_factor == pytest.approx(before, rel=0.05)


def test_a_disturbed_step_moves_little_and_surprises_no_more_than_it_may() -> None:
    device_speed = followed(EXTRA, 300, 8)
    before = device_speed.drafting_factor
    assert device_speed.learn(1000.0, is_drafting=True) < 1.5
    assert device_speed.drafting_factor == pytest.approx(before, rel=0.02)
    assert device_speed.plain_factor < 1.5


def test_a_step_as_expected_is_no_surprise() -> None:
    device_speed = DeviceSpeed()
    for _ in range(50):
        device_speed.learn(0.5, is_drafting=False)
    assert device_speed.plain_factor == pytest.approx(0.5, rel=0.02)
    assert device_speed.learn(0.5, is_drafting=False) == pytest.approx(1.0, rel=0.02)


def test_a_disturbed_plain_step_hardly_moves_the_price_of_plain_ones() -> None:
    device_speed = DeviceSpeed()
    for factor in (*[0.5] * 14, 40.0, 0.5):
        device_speed.learn(factor, is_drafting=False)
    assert device_speed.plain_factor == pytest.approx(0.5, rel=0.05)
