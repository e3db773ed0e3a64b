"""Whether heads beside the hybrid are worth their time: asked in some runs of steps, left out in others.

Heads save steps and take time in each. Which is more depends on the device and on the texts, so steps of both kinds
are timed. The faster way goes on, and the other one is tried again after longer and longer. A text that begins
while heads are left out shows them no states, which takes time too, so a trial of them begins with a text.
"""

from __future__ import annotations

# Steps of a trial, and between two trials: at first and, doubling, at most.
TRIAL, FIRST_PERIOD, LONGEST_PERIOD = 6, 128, 2048
# What the earlier steps of a way weigh when it begins again.
FADING = 0.5
# A trial ends after its second step if it has less than this share of the other way's tokens a second.
FAR_BEHIND = 0.5


class Asking:
    """Decides whether the next step asks the heads, by the tokens and the times of whole steps."""

    def __init__(self) -> None:
        self.is_asked, self._is_trial = True, True
        # Without and with the heads.
        self._tokens, self._times = [0.0, 0.0], [0.0, 0.0]
        self._num_left, self._period = TRIAL, FIRST_PERIOD // 2

    @property
    def wants_states(self) -> bool:
        """Whether a text that begins now shows its states."""
        return self.is_asked or self._is_trial

    def begin_text(self) -> None:
        """Begin a trial of the heads if one is due."""
        if not self.wants_states and self._num_left <= 0:
            self._begin(True, TRIAL)

    def learn(self, num_tokens: int, nanoseconds: int) -> None:
        """Learn from a step as it was decided."""
        self._tokens[self.is_asked] += num_tokens
        self._times[self.is_asked] += nanoseconds
        self._num_left -= 1
        if not self.wants_states:
            return
        is_over = self._num_left <= 0
        if 0.0 in self._times or not self._is_trial:
            if is_over:
                self._begin(not self.is_asked, TRIAL)
            return
        without, asked = (a / b for a, b in zip(self._tokens, self._times, strict=True))
        mine, other = (asked, without) if self.is_asked else (without, asked)
        if not is_over and (self._num_left > TRIAL - 2 or mine > FAR_BEHIND * other):
            return
        is_won = (asked > without) == self.is_asked
        self._period = FIRST_PERIOD if is_won else min(2 * self._period, LONGEST_PERIOD)
        self._begin(asked > without, self._period)

    def _begin(self, is_asked: bool, num_steps: int) -> None:
        self.is_asked, self._num_left, self._is_trial = is_asked, num_steps, num_steps == TRIAL
        self._tokens[is_asked] *= FADING
        self._times[is_asked] *= FADING
