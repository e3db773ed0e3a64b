"""A slow suffix tree: a count and a ranking for every string, written down one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

String = tuple[int, ...]


class SlowTree:
    """Counts every string of up to `depth` tokens in texts that come and go whole.

    Attributes:
        counts: places of each string, those that a text has left included as 0.
        ranked: the tokens that followed each string, by count; of equal counts by what happened last.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.counts: dict[String, int] = defaultdict(int)
        self.ranked: dict[String, list[int]] = defaultdict(list)

    def add(self, text: Sequence[int], begin: int = 0) -> None:
        """Count the strings that end at a token from `begin` on."""
        for end in range(begin, len(text)):
            for start in range(max(0, end - self._depth + 1), end + 1):
                self._rise(tuple(text[start:end]), text[end])

    def remove(self, text: Sequence[int]) -> None:
        """Take the strings of a text out again, in the order of their beginnings."""
        for start in range(len(text)):
            for end in range(start, min(start + self._depth, len(text))):
                self._fall(tuple(text[start:end]), text[end])

    def path(self, match: Sequence[int], most: int, least: float) -> tuple[list[int], float]:
        """Return the likeliest path after a string, and its score."""
        tokens: list[int] = []
        score = 0.0
        while len(tokens) < most:
            string = (*match, *tokens)
            if len(string) == self._depth or not self.ranked[string]:
                break
            token = self.ranked[string][0]
            probability = self.counts[(*string, token)] / self.counts[tuple(match)]
            if probability < least:
                break
            tokens.append(token)
            score += probability
        return tokens, score

    def best_path(
        self, text: Sequence[int], most: int, factor: float, least: float
    ) -> tuple[list[int], float]:
        """Return the path with the largest score, of equals that of the longest match."""
        best: tuple[list[int], float] = ([], 0.0)
        for length in range(1, min(self._depth, len(text))):
            match = tuple(text[-length:])
            if self.counts[match]:
                found = self.path(match, min(most, int(length * factor + 1e-6)), least)
                if found[1] >= best[1] - 1e-9:
                    best = found
        return best

    def _groups(self, string: String) -> dict[int, list[int]]:
        """Return the tokens after a string by their count."""
        groups: dict[int, list[int]] = defaultdict(list)
        for token in self.ranked[string]:
            groups[self.counts[(*string, token)]].append(token)
        return groups

    def _rank(self, string: String, groups: dict[int, list[int]]) -> None:
        counts = sorted(filter(None, groups), reverse=True)
        self.ranked[string] = [token for count in counts for token in groups[count]]

    def _rise(self, string: String, token: int) -> None:
        """The first of its group becomes the first of the next one, any other its last."""
        groups, count = self._groups(string), self.counts[(*string, token)]
        is_first = count and groups[count][0] == token
        if count:
            groups[count].remove(token)
        groups[count + 1].insert(0 if is_first else len(groups[count + 1]), token)
        self.counts[(*string, token)] += 1
        self._rank(string, groups)

    def _fall(self, string: String, token: int) -> None:
        """It becomes the first of the group below."""
        groups, count = self._groups(string), self.counts[(*string, token)]
        groups[count].remove(token)
        groups[count - 1].insert(0, token)
        self.counts[(*string, token)] -= 1
        self._rank(string, groups)
