"""Earlier places in the text that agree with its end, and the token that followed there last.

Prompt and output of one sequence are indexed by their n-grams, n = 1 to 4, each with the position
that followed it last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONGEST_KEY = 4
LONGEST_MATCH = 24


class Match(NamedTuple):
    """An earlier place in the text.

    Attributes:
        position: index of the token that followed there.
        length: how many tokens before it agree.
    """

    position: int
    length: int


class SuffixIndex:
    """The text of one sequence, and where each n-gram of it was last.

    Attributes:
        text: all tokens.
        tokens: which tokens occur in it.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.text: list[int] = []
        self.tokens: set[int] = set()
        self._following: dict[tuple[int, ...], int] = {}
        self.append(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens; an n-gram is indexed when its continuation exists, so no suffix finds itself."""
        text, following = self.text, self._following
        for token in tokens:
            end = len(text)
            last = tuple(text[-LONGEST_KEY:])
            for begin in range(len(last)):
                following[last[begin:]] = end
            text.append(token)
        self.tokens.update(tokens)

    def match_end(self) -> Match | None:
        """Return the latest place that agrees with the end of the text, by the longest key known."""
        text = self.text
        found = self.match(tuple(text[-LONGEST_KEY:]))
        if found is None or found.length < LONGEST_KEY:
            return found
        position, length = found
        while (
            length < LONGEST_MATCH
            and length < position
            and text[position - 1 - length] == text[-1 - length]
        ):
            length += 1
        return Match(position, length)

    def match(self, last: tuple[int, ...]) -> Match | None:
        """Return the latest place that agrees with the longest known end of these tokens."""
        for begin in range(len(last)):
            position = self._following.get(last[begin:])
            if position is not None:
                return Match(position, len(last) - begin)
        return None

    def follow(self, match: Match | None, token: int, last: tuple[int, ...]) -> Match | None:
        """Return the match after one more token; `last` are the last tokens, that one included."""
        if match is not None:
            position = match.position
            if self.text[position] == token and position + 1 < len(self.text):
                return Match(position + 1, match.length + 1)
        return self.match(last)
