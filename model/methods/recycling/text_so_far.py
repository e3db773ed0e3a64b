"""What the text under way has said so far: a successor that it has named is likelier to come again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

# How familiar a successor is: the text has not named it, only the prompt has, the answer has, or it has stood
# right after the token before.
NUM_LEVELS = 4
OF_PROMPT, OF_ANSWER, AFTER_TOKEN = 1, 2, 3


class TextSoFar:
    """The tokens of prompt and answer, and which stood right after which."""

    def __init__(self) -> None:
        self._levels: dict[int, int] = {}
        self._pairs: set[tuple[int, int]] = set()
        self._last = -1

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a text."""
        self._levels = dict.fromkeys(prompt_ids, OF_PROMPT)
        self._pairs = set(pairwise(prompt_ids))
        self._last = prompt_ids[-1]

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens of the answer."""
        for token in tokens:
            self._levels[token] = OF_ANSWER
            self._pairs.add((self._last, token))
            self._last = token

    def level(self, token: int, successor: int) -> int:
        """Return how familiar a successor of a token is, 0 to `NUM_LEVELS` - 1."""
        if (token, successor) in self._pairs:
            return AFTER_TOKEN
        return self._levels.get(successor, 0)
