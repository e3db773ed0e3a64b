"""The n-grams of a text, and what followed each.

Of the places where an n-gram occurs, the latest one counts that has all the tokens of a continuation
after it; if none has, the first one, which has the most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class NgramPool:
    """The n-grams of a growing text; a whole continuation has `length` tokens."""

    def __init__(self, max_ngram_size: int, length: int) -> None:
        self._sizes = range(max_ngram_size, 0, -1)
        self._length = length
        self._text: list[int] = []
        # n-gram -> where its continuation starts
        self._starts: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        text, starts = self._text, self._starts
        for token in tokens:
            begun = len(text)  # a continuation begins with this token,
            whole = begun + 1 - self._length  # and another one ends with it
            text.append(token)
            for size in self._sizes:
                if size <= begun:
                    starts.setdefault(tuple(text[begun - size : begun]), begun)
                if size <= whole:
                    starts[tuple(text[whole - size : whole])] = whole

    def after(self, ending: Sequence[int]) -> list[int]:
        """Return the continuation of the longest known n-gram at the end of these tokens; empty if none."""
        for size in self._sizes:
            start = self._starts.get(tuple(ending[-size:]))
            if start is not None:
                return self._text[start : start + self._length]
        return []
