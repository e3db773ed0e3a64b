"""Which row of logits belongs to which token, over all cuts that a scheduler can make."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from token_recycling_vllm.seams import align

REQUESTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 5)), max_size=6)


def truth(num_drafted: list[int], num_taken: list[int]) -> list[list[int | None]]:
    """Return the row of every token when these many drafted tokens were taken."""
    rows, first = [], 0
    for drafted, taken in zip(num_drafted, num_taken, strict=True):
        rows.append([first + place if place <= taken else None for place in range(1 + drafted)])
        first += 1 + taken
    return rows


@given(REQUESTS)
def test_a_row_is_right_or_unknown(requests):
    num_drafted = [drafted for drafted, _, _ in requests]
    num_taken = [min(taken, drafted) for drafted, taken, _ in requests]
    num_emitted = [
        min(emitted, 1 + taken) for taken, (_, _, emitted) in zip(num_taken, requests, strict=True)
    ]
    num_rows = len(requests) + sum(num_taken)
    for found, right in zip(
        align(num_drafted, num_emitted, num_rows), truth(num_drafted, num_taken), strict=True
    ):
        assert all(row is None or row == known for row, known in zip(found, right, strict=True))


@given(REQUESTS)
def test_a_row_is_known_if_all_possible_cuts_agree(requests):
    requests = requests[:4]
    num_drafted = [drafted for drafted, _, _ in requests]
    num_taken = [min(taken, drafted) for drafted, taken, _ in requests]
    num_emitted = [
        min(emitted, 1 + taken) for taken, (_, _, emitted) in zip(num_taken, requests, strict=True)
    ]
    num_rows = len(requests) + sum(num_taken)
    possible = [
        truth(num_drafted, list(taken))
        for taken in product(
            *(range(max(e - 1, 0), d + 1) for d, e in zip(num_drafted, num_emitted, strict=True))
        )
        if len(requests) + sum(taken) == num_rows
    ]
    found = align(num_drafted, num_emitted, num_rows)
    for index, rows in enumerate(found):
        for place, row in enumerate(rows):
            values = {rows_of[index][place] for rows_of in possible}
            assert row == (values.pop() if len(values) == 1 else None)


def test_nothing_is_known_of_a_step_that_the_drafts_did_not_lead_to():
    assert align([2, 1], [1, 1], 6) == [[None] * 3, [None] * 2]  # more rows than tokens
    assert align([2, 1], [1, 1], 1) == [[None] * 3, [None] * 2]  # fewer rows than requests
    assert align([1], [4], 2) == [[None] * 2]  # more emitted than drafted
    assert align([], [], 0) == []
