"""A suffix automaton that grows token by token and finds earlier occurrences of the text's end.

A state stands for a set of suffixes that occur at the same places; following links from the last
state walks the suffixes of the text from the longest to the empty one. Appending a token takes
amortised constant time, and n tokens make fewer than 2n states and 3n transitions.

The link of the last state is the longest suffix that occurs earlier: no separate search is needed.

Source: A. Blumer et al., The smallest automaton recognizing the subwords of a text, Theoretical
Computer Science 40, 1985.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ROOT = 0  # the state of the empty suffix


class Match(NamedTuple):
    """An earlier occurrence of the text's end."""

    length: int  # tokens of the longest suffix that occurs earlier; 0 if there is none
    continuation: Sequence[int]  # the tokens that followed it there


class SuffixAutomaton:
    """The suffix automaton of a growing text.

    Args:
        tokens: the text to begin with.
        prefers_latest: whether a match continues from the place where it was last the longest
            match, not from its first occurrence. Tracking the true last occurrence of every suffix
            would not be constant time; this is, and comes close.
    """

    def __init__(self, tokens: Sequence[int] = (), prefers_latest: bool = False) -> None:
        self.text: list[int] = []
        # Of each state: the state after one more token; the state of its longest suffix that occurs at
        # more places, -1 for the root; the length of its longest string; where one of its occurrences
        # ends, so that `text[end]` follows it.
        self.transitions: list[dict[int, int]] = [{}]
        self.links, self.lengths, self.ends = [-1], [0], [0]
        self._last = ROOT
        self._prefers_latest = prefers_latest
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def match(self, max_tokens: int) -> Match:
        """Return the longest suffix that occurs earlier, with up to `max_tokens` that followed it."""
        if self._last == ROOT:
            return Match(0, [])
        state = self.links[self._last]
        end = self.ends[state]
        length = self.lengths[state]
        return Match(length, self.text[end : end + max_tokens] if length else [])

    def _append(self, token: int) -> None:
        transitions, links, lengths = self.transitions, self.links, self.lengths
        state = self._last
        if self._prefers_latest and state != ROOT:
            self.ends[links[state]] = len(self.text)
        self.text.append(token)
        new = self._last = self._add_state({}, len(self.text), len(self.text))
        while state >= 0 and token not in transitions[state]:
            transitions[state][token] = new
            state = links[state]
        if state < 0:
            links[new] = ROOT
            return
        after = transitions[state][token]
        if lengths[after] == lengths[state] + 1:
            links[new] = after
            return
        # The shorter strings of `after` now occur at one more place than its longer ones.
        split = self._add_state(dict(transitions[after]), lengths[state] + 1, self.ends[after])
        links[split] = links[after]
        links[after] = links[new] = split
        while state >= 0 and transitions[state].get(token) == after:
            transitions[state][token] = split
            state = links[state]

    def _add_state(self, transitions: dict[int, int], length: int, end: int) -> int:
        self.transitions.append(transitions)
        self.links.append(ROOT)
        self.lengths.append(length)
        self.ends.append(end)
        return len(self.links) - 1
