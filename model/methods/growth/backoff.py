"""When drafts that do not pay are tried again: what they would bring is only known by trying."""

from __future__ import annotations

# Steps without a draft before it is tried again: at first and, doubled by every try in vain, at last.
FIRST_WAIT, LONGEST_WAIT = 100, 1600


class Backoff:
    """Asked before every step, whether it drafts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget tries in vain."""
        self._num_skipped = 0
        self._wait = FIRST_WAIT

    @property
    def is_waiting(self) -> bool:
        """Whether drafts did not pay in the last step that asked."""
        return self._num_skipped > 0 or self._wait > FIRST_WAIT

    def allow(self, pays: bool) -> bool:
        """Return whether the step under way drafts: where that pays and, now and then, where it does not."""
        if pays:
            self.reset()
            return True
        if self._num_skipped < self._wait:
            self._num_skipped += 1
            return False
        self._num_skipped = 0
        self._wait = min(2 * self._wait, LONGEST_WAIT)
        return True
