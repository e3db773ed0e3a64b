"""The spine's source: what followed the last five, four or three tokens where they occurred first.

Section 4.3 of the paper rates a match by two signs: whether all earlier occurrences went on with the
same token, and how many tokens are there to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NGRAM_SIZES = (5, 4, 3)
# Tokens from which on a chain counts as long.
LONG_CHAIN = 8
# A chain trusted more than this is looked up further from its own end.
EXTENDING = 0.6


@dataclass(slots=True)
class _Occurrences:
    """The earlier occurrences of an n-gram."""

    start: int  # where the first one's continuation begins
    is_single: bool = True  # whether there is one only
    agree: bool = True  # whether the same token followed all of them


class EarlierText:
    """Prompt and answer so far, with an index of its n-grams.

    Args:
        max_chain: longest continuation of one look-up.
        max_extended_chain: longest chain of several look-ups, at full confidence.
    """

    def __init__(self, max_chain: int, max_extended_chain: int) -> None:
        self._max_chain = max_chain
        self._max_extended_chain = max_extended_chain
        self.clear()

    def clear(self) -> None:
        self.tokens: list[int] = []
        self._occurrences: dict[tuple[int, ...], _Occurrences] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; an n-gram is indexed when its continuation exists, so no suffix finds itself."""
        text = self.tokens
        for token in tokens:
            for size in NGRAM_SIZES:
                if size <= len(text):
                    self._index(tuple(text[-size:]), token)
            text.append(token)

    def chain(self) -> tuple[list[int], float]:
        """Return the continuation of the text's end, and the confidence in it, 0 to 1."""
        return self._look_up(self.tokens[-NGRAM_SIZES[0] :])

    def extended(self, chain: list[int], confidence: float) -> list[int]:
        """Return a trusted chain with what look-ups from its own end add to it.

        At full confidence a look-up that has less is the last one.
        """
        if confidence <= EXTENDING:
            return chain
        longest = int(self._max_extended_chain * confidence)
        chain = list(chain)
        end = self.tokens[-NGRAM_SIZES[0] :] + chain
        while len(chain) < longest:
            following, trust = self._look_up(end[-NGRAM_SIZES[0] :])
            chain += following
            end += following
            if not following or (confidence >= 1.0 and trust < 1.0):
                break
        return chain

    def _index(self, ngram: tuple[int, ...], token: int) -> None:
        """Add the occurrence that ends the text, which goes on with `token`."""
        known = self._occurrences.get(ngram)
        if known is None:
            self._occurrences[ngram] = _Occurrences(len(self.tokens))
            return
        known.is_single = False
        known.agree = known.agree and token == self.tokens[known.start]

    def _look_up(self, suffix: list[int]) -> tuple[list[int], float]:
        """Return the continuation of the longest n-gram at the end of `suffix`, and the confidence in it."""
        for size in NGRAM_SIZES:
            found = self._occurrences.get(tuple(suffix[-size:]))
            if found is not None:
                chain = self.tokens[found.start : found.start + self._max_chain]
                return chain, _confidence(len(chain), found.agree and not found.is_single)
        return [], 0.0


def _confidence(length: int, is_consensus: bool) -> float:
    if is_consensus:
        return 1.0
    if length >= LONG_CHAIN:
        return min(0.9, 0.7 + 0.2 * (length - LONG_CHAIN) / 12.0)
    return 0.6 * length / LONG_CHAIN
