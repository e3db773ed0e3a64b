"""Finds the row of a step's logits that belongs to each token of each request.

vLLM computes 1 + s rows for a request, in the order of the batch, where s is how many of its
drafted tokens the scheduler took: all, or a prefix (token budget, grammar, end of the context), or
none (preemption). A drafter is not told s. It knows what it drafted, what was emitted and how many
rows there are in all, and these often determine every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def align(
    num_drafted: Sequence[int], num_emitted: Sequence[int], num_rows: int
) -> list[list[int | None]]:
    """Return, for each request, the row of its last committed token and of each drafted token.

    A row is None if it cannot be determined, or may not exist.

    Args:
        num_drafted: tokens drafted for each request in the step before.
        num_emitted: tokens that each request emitted in this step; 0 in the middle of a prompt.
        num_rows: rows of logits of this step.
    """
    unknown: list[list[int | None]] = [[None] * (1 + drafted) for drafted in num_drafted]
    # Of d drafted tokens, at least the emitted ones but one were taken.
    most_cut = [
        drafted - max(emitted - 1, 0)
        for drafted, emitted in zip(num_drafted, num_emitted, strict=True)
    ]
    num_cut = sum(num_drafted) + len(num_drafted) - num_rows
    total = sum(most_cut)
    if min(most_cut, default=0) < 0 or not 0 <= num_cut <= total:
        return unknown  # not a step that these drafts led to
    before = [0, *accumulate(most_cut)]  # most that can be cut of the requests before
    start = 0  # row of the request if nothing is cut before it
    for index, drafted in enumerate(num_drafted):
        least_before = max(0, num_cut - (total - before[index]))
        if least_before == min(num_cut, before[index]):
            first = start - least_before
            known = 1 + drafted - min(num_cut, most_cut[index])
            for place in range(known):
                unknown[index][place] = first + place
        start += 1 + drafted
    return unknown
