"""The switch that turns drafting off for a while when it does not pay.

Even a step whose drafter finds nothing pays for the search and for reading and learning candidates.
On a small model that is several percent of a step, which text without repetition never earns back.
"""

from __future__ import annotations

# Loss that drafting may make before a rest, in root-only steps: at first, and after a rest.
FIRST_BALANCE, SECOND_BALANCE = 6.0, 3.0
# Root-only steps: at the start (to learn their cost), in a first rest, and at most in a repeated one, if drafting
# lost at most one step beyond the balance.
FIRST_REST, REST, LONGEST_REST = 6, 32, 128
# Drafting steps between single root-only steps that measure the cost of drafting: at first and,
# doubling, at most. Only steps of both kinds close together show that cost.
FIRST_PERIOD, LONGEST_PERIOD = 4, 64


class DraftingSwitch:
    """Decides whether the next step drafts, from the time that drafting has saved.

    The balance holds the savings of drafting, in root-only steps. When it is used up, drafting
    rests; then it starts again with a smaller balance, and each further failure doubles the rest.
    A single step can lose far more than the balance, such as one in which heads work beside a
    small model; the rest is longer then, in proportion to what was lost beyond the balance.
    """

    def __init__(self) -> None:
        self._num_left = FIRST_REST
        self._rest = REST
        self._account = FIRST_BALANCE
        self._num_drafted = 0
        self._period = FIRST_PERIOD

    @property
    def is_resting(self) -> bool:
        """Whether the next step is root-only."""
        return self._num_left > 0

    def rest(self) -> None:
        """Count a root-only step."""
        self._num_left -= 1

    def learn(self, num_saved: float) -> None:
        """Count a drafting step that saved this many root-only steps; negative: lost."""
        self._account += num_saved
        self._num_drafted += 1
        if self._account >= FIRST_BALANCE:
            self._account, self._rest = FIRST_BALANCE, REST
        elif self._account < 0.0:
            self._num_left = round(self._rest * max(1.0, -self._account))
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._account, self._num_drafted = SECOND_BALANCE, 0
        if self._num_drafted == self._period:
            self._num_left, self._num_drafted = 1, 0
            self._period = min(2 * self._period, LONGEST_PERIOD)
