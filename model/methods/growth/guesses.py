"""What a drafter with heads would guess: rows of likely tokens after the nodes of a tree of its own.

Another drafter can take them as one of its sources.

Shapes: M nodes, k tokens in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...engine.budget import DraftBudget
from ...engine.drafter import Drafter

ANY_TOKEN = -1  # of a node: whatever its token is


class Guesses(NamedTuple):
    """The likeliest tokens after the text, and after the nodes of a tree; the root, its last token, comes first."""

    tokens: Sequence[int]  # of the nodes [M], or `ANY_TOKEN`
    parents: Sequence[int]  # of the nodes [M]; -1 for the root
    rows: Sequence[Sequence[int]]  # likely tokens after each node, [M, k]
    log_probabilities: Sequence[Sequence[float]]  # of these tokens, [M, k]


class Guesser(Drafter):
    """A drafter whose guesses another one can take."""

    def guesses(self, context: Sequence[int], budget: DraftBudget) -> Guesses | None:
        """Return what it would draft from, in the place of `propose`; None if it knows nothing of the text yet."""
        raise NotImplementedError
