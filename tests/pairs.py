"""Pairs in place of a full product, where each of two things is to meet some of the other.

`ALL_PAIRS=1` in the environment is the full product.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

A, B = TypeVar("A"), TypeVar("B")
ALL_PAIRS = os.environ.get("ALL_PAIRS") == "1"


def pairs(ones: Sequence[A], others: Sequence[B], each: int = 1) -> list[tuple[A, B]]:
    """Return pairs in which each of `ones` has `each` of the `others`, and these are used equally often.

    Raises:
        ValueError: if one of the `others` would not be used.
    """
    others = list(others)
    if each * len(ones) < len(others):
        raise ValueError(
            f"each: got {each} of {len(others)} for {len(ones)}; allowed: enough for all"
        )
    if ALL_PAIRS:
        return [(one, other) for one in ones for other in others]
    found = []
    for place, one in enumerate(ones):
        numbers = range(each * place, each * place + each)
        found += [(one, others[number % len(others)]) for number in numbers]
    return found
