"""Drafts that do not pay are tried again, ever less often.

Run: pytest tests/model/methods/growth/test_backoff.py
"""

from __future__ import annotations

from model.methods.growth.backoff import FIRST_WAIT, LONGEST_WAIT, Retries


def waits(retries: Retries, count: int) -> list[int]:
    """Return how many steps pass without a draft before each of so many tries in vain."""
    found = []
    for _ in range(count):
        skipped = 0
        while not retries.allow(False):
            skipped += 1
        found.append(skipped)
    return found


def test_waits_double_up_to_the_longest() -> None:
    found = waits(Retries(), 6)
    assert found[:3] == [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT]
    assert found[-1] == LONGEST_WAIT


def test_a_draft_that_pays_is_always_allowed_and_ends_the_waiting() -> None:
    retries = Retries()
    waits(retries, 3)
    assert all(retries.allow(True) for _ in range(5))
    assert waits(retries, 1) == [FIRST_WAIT]


def test_forgetting_is_a_new_beginning() -> None:
    retries = Retries()
    waits(retries, 3)
    retries.reset()
    assert waits(retries, 1) == [FIRST_WAIT]


def test_it_waits_from_the_first_step_that_does_not_pay_to_the_first_that_does() -> None:
    retries = Retries()
    assert not retries.is_waiting
    for _ in range(3 * FIRST_WAIT + 3):  # tries in vain among them
        retries.allow(False)
        assert retries.is_waiting
    retries.allow(True)
    assert not retries.is_waiting
    retries.allow(False)
    retries.reset()
    assert not retries.is_waiting
