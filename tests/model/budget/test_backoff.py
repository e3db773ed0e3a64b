"""Drafts that do not pay are tried again, ever less often.

Run: pytest tests/model/budget/test_backoff.py
"""

from __future__ import annotations

from model.budget.acceptance import FIRST_WAIT, LONGEST_WAIT, Backoff


def waits(backoff: Backoff, count: int) -> list[int]:
    """Return the number of steps without a draft before each of this many failed tries."""
    found = []
    for _ in range(count):
        skipped = 0
        while not backoff.allow(False):
            skipped += 1
        found.append(skipped)
    return found


def test_waits_double_up_to_the_longest() -> None:
    found = waits(Backoff(), 6)
    assert found[:3] == [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT]
    assert found[-1] == LONGEST_WAIT


def test_a_draft_that_pays_is_always_allowed_and_ends_the_waiting() -> None:
    backoff = Backoff()
    waits(backoff, 3)
    assert all(backoff.allow(True) for _ in range(5))
    assert waits(backoff, 1) == [FIRST_WAIT]


def test_forgetting_is_a_new_beginning() -> None:
    backoff = Backoff()
    waits(backoff, 3)
    backoff.reset()
    assert waits(backoff, 1) == [FIRST_WAIT]


def test_it_waits_from_the_first_step_that_does_not_pay_to_the_first_that_does() -> None:
    backoff = Backoff()
    assert not backoff.is_waiting
    for _ in range(3 * FIRST_WAIT + 3):  # tries in vain among them
        backoff.allow(False)
        assert backoff.is_waiting
    backoff.allow(True)
    assert not backoff.is_waiting
    backoff.allow(False)
    backoff.reset()
    assert not backoff.is_waiting
