"""When to draft at all: where drafting does not pay, plain decoding goes on for a while.

Even a step that drafts nothing costs a drafter's search, and candidates that are read and learned. On
a small model that is several percent of a step, which text without repetition never pays back.
"""

from __future__ import annotations

# All in steps of plain decoding: what drafting may lose before it rests, at first and after a rest.
FIRST_BALANCE, SECOND_BALANCE = 6.0, 3.0
# Plain steps at the very beginning, to know their cost; in a rest, and in one rest after another.
FIRST_REST, REST, LONGEST_REST = 6, 32, 128
# Drafting steps after which a single plain one shows the cost again, at first and, doubled each
# time, at last: what drafting costs shows in steps of both kinds that are close together.
FIRST_PERIOD, LONGEST_PERIOD = 4, 64


class DraftingSwitch:
    """Whether the next step drafts, from what drafting has saved so far.

    An account holds what drafting has saved lately, in steps of plain decoding. When it is empty,
    steps are plain for a while; then a smaller balance is given, and after every further failure the
    rest is twice as long.
    """

    def __init__(self) -> None:
        self._num_left = FIRST_REST
        self._rest = REST
        self._account = FIRST_BALANCE
        self._num_drafted = 0
        self._period = FIRST_PERIOD

    @property
    def is_resting(self) -> bool:
        """Whether the next step is plain."""
        return self._num_left > 0

    def rest(self) -> None:
        """Take note of a plain step."""
        self._num_left -= 1

    def learn(self, num_saved: float) -> None:
        """Take note of a drafting step that saved so many plain steps; a negative number: lost."""
        self._account += num_saved
        self._num_drafted += 1
        if self._account >= FIRST_BALANCE:
            self._account, self._rest = FIRST_BALANCE, REST
        elif self._account < 0.0:
            self._num_left, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
            self._account, self._num_drafted = SECOND_BALANCE, 0
        if self._num_drafted == self._period:
            self._num_left, self._num_drafted = 1, 0
            self._period = min(2 * self._period, LONGEST_PERIOD)
