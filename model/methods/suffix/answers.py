"""The answers of all texts in one suffix tree, those in progress included; the oldest ones leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .suffix_tree import OpenText, SuffixTree


class Answers:
    """At most `most` answers; strings of up to `depth` tokens are counted.

    Attributes:
        tree: the suffix tree of the answers.
        kept: the tokens of each answer that has one, the oldest first.
    """

    def __init__(self, depth: int, most: int) -> None:
        self._most = most
        self.tree = SuffixTree(depth)
        self.kept: deque[list[int]] = deque()

    def begin(self) -> OpenText:
        """Begin an answer; several may be in progress."""
        self._make_room()
        return self.tree.open_text()

    def extend(self, answer: OpenText, tokens: Sequence[int]) -> None:
        """Append new tokens to an answer. One that had to leave goes on as a new answer."""
        if not self._most or not tokens:
            return
        if not answer.tokens:
            self._make_room()
            self.kept.append(answer.tokens)
        answer.extend(tokens)

    def clear(self) -> None:
        """Forget all answers; those in progress go on as new ones."""
        self.tree.clear()
        self.kept.clear()

    def _make_room(self) -> None:
        while self.kept and len(self.kept) >= self._most:
            self.tree.remove(self.kept.popleft())
