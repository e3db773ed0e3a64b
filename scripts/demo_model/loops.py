"""The definition of a loop that training, replay and tests share.

A text loops if at some point its trailing 24 tokens are periodic with a period of at most 12. Looped
text is easy to draft, so it flatters every method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WINDOW, MAX_PERIOD = 24, 12  # tokens


class Loop(NamedTuple):
    """The place where a text has begun to loop."""

    position: int  # number of tokens after which the loop is seen
    period: int  # length of the repeated part, in tokens


def find_loop(token_ids: Sequence[int]) -> Loop | None:
    """Find where a text has begun to loop.

    Returns:
        The first place whose last `WINDOW` tokens are periodic with a period of at most `MAX_PERIOD`,
        or None if there is no such place.
    """
    runs = [0] * (MAX_PERIOD + 1)
    for position, token in enumerate(token_ids):
        for period in range(1, MAX_PERIOD + 1):
            is_repeat = position >= period and token_ids[position - period] == token
            runs[period] = runs[period] + 1 if is_repeat else 0
            if runs[period] >= WINDOW - period:
                return Loop(position + 1, period)
    return None
