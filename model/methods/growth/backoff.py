"""Backoff: when to try drafts again that did not pay, since only trying shows whether they would."""

from __future__ import annotations

# Steps without a draft before a new try: at first and, doubled after every failed try, at most.
FIRST_WAIT, LONGEST_WAIT = 100, 1600


class Backoff:
    """Decides before every step whether it drafts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget failed tries."""
        self._num_skipped = 0
        self._wait = FIRST_WAIT

    @property
    def is_waiting(self) -> bool:
        """Whether drafts did not pay at the last decision."""
        return self._num_skipped > 0 or self._wait > FIRST_WAIT

    def allow(self, pays: bool) -> bool:
        """Return whether the current step drafts: if that pays and, now and then, if it does not."""
        if pays:
            self.reset()
            return True
        if self._num_skipped < self._wait:
            self._num_skipped += 1
            return False
        self._num_skipped = 0
        self._wait = min(2 * self._wait, LONGEST_WAIT)
        return True
