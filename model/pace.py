"""When to draft at all: where drafting does not pay, plain decoding goes on for a while.

Even a step that drafts nothing costs a drafter's search, and candidates that are read and learned. On
a small model that is several percent of a step, which text without repetition never pays back.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# All in steps of plain decoding: what drafting may lose before it rests, at first and after a rest.
CREDIT, SECOND_CREDIT = 6.0, 3.0
# Plain steps at the very beginning, to know their price; in a rest, and in one rest after another.
FIRST_REST, REST, LONGEST_REST = 6, 32, 128
# Drafting steps after which a single plain one shows the price again, where the gain is not clear.
PERIOD = 32
# Plain steps whose median is the price: single ones are disturbed too often.
NUM_PLAIN = 15


class Pace:
    """Whether the next step drafts, from what drafting steps and plain ones took.

    An account holds what drafting has saved lately, in steps of plain decoding. When it is empty,
    steps are plain for a while; then a smaller credit is given, and after every further failure the
    rest is twice as long.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=NUM_PLAIN)  # against the curve
        self._num_left = FIRST_REST
        self._rest = REST
        self._account = CREDIT
        self._num_drafted = 0

    @property
    def is_resting(self) -> bool:
        """Whether the next step is plain."""
        return self._num_left > 0

    @property
    def plain_factor(self) -> float:
        """How much longer a plain step takes than a pass over one node on the measured curve."""
        return median(self._plain) if self._plain else 1.0

    def rest(self, factor: float) -> None:
        """Take note of a plain step that took `factor` times what the curve says."""
        self._plain.append(factor)
        self._num_left -= 1

    def learn(self, num_saved: float) -> None:
        """Take note of a drafting step that saved so many plain steps; a negative number: lost."""
        self._account += num_saved
        self._num_drafted += 1
        if self._account >= CREDIT:
            self._account, self._rest, self._num_drafted = CREDIT, REST, 0
        elif self._account < 0.0:
            self._num_left, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
            self._account, self._num_drafted = SECOND_CREDIT, 0
        elif self._num_drafted == PERIOD:
            self._num_left, self._num_drafted = 1, 0
