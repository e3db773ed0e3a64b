"""The probabilities of `--tree-version auto` in simple Python: the reference for `auto_tree.cpp`.

Every successor is stored with a coded probability. The model gives it for one context; a row can
average over the contexts of its token. How often successors of a rank and code are accepted is
learned while decoding, separately for successors that the text has already named.

Shapes: V vocabulary, k successors kept for a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import islice, pairwise, takewhile

import numpy as np
import torch

from model.budget.acceptance import AcceptanceRates
from model.budget.best_first import CENTRES
from model.engine.budget import DraftBudget
from model.engine.tree import DraftTree
from model.engine.verification import Acceptance
from model.methods.recycling.auto_tree import NUM_LEVELS, TRUST
from tests.model.budget.reference_growth import (
    Growth,
    Guess,
    codes_of,
    probabilities,
    probability_codes,
)

OF_PROMPT, OF_ANSWER, AFTER_TOKEN = 1, 2, 3


class TextSoFar:
    """The tokens of prompt and answer, and their pairs of neighbours."""

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
        """Return the level of a successor, 0 to `NUM_LEVELS` - 1: where the text has named it."""
        if (token, successor) in self._pairs:
            return AFTER_TOKEN
        return self._levels.get(successor, 0)


class ReferenceRowGuesses:
    """Coded probabilities beside the matrix, and their learned acceptance.

    Args:
        matrix: the adjacency matrix, int32 [V, k], which is written here too.
        is_average: whether a written row is half the old and half the new one; else the new one replaces it.
    """

    def __init__(self, matrix: np.ndarray, is_average: bool) -> None:
        self._matrix = matrix
        self._is_average = is_average
        self._codes = np.zeros(matrix.shape, dtype=np.uint8)  # 0: no row yet
        k = matrix.shape[1]
        priors = [TRUST * centre for _ in range(k) for centre in CENTRES for _ in range(NUM_LEVELS)]
        self._rates = AcceptanceRates(priors)
        self._text = TextSoFar()
        # The tree grown for the current step; None if another drafter's tree is verified.
        self._growth: Growth[int] | None = None

    def sibling(self) -> ReferenceRowGuesses:
        """Return guesses from the same rows and rates for another text."""
        sibling = copy(self)
        sibling._text = TextSoFar()
        return sibling

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a text; forget an unverified tree of the last one."""
        self._growth = None
        self._text.start(prompt_ids)

    def append(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the text, whose successors are unknown."""
        self._text.append(tokens)

    def grow(self, root: int, num_drafted: int, budget: DraftBudget) -> DraftTree:
        """Return the tree of the most probable nodes that are worth their cost."""
        assert budget.cost_curve is not None
        growth = self._begin(root, budget)
        return growth.tree(budget.cost_curve.best_size(growth))

    def offer(self, root: int, num_drafted: int, budget: DraftBudget, least: float) -> list[float]:
        """Grow the tree of the most probable nodes; return the probabilities that are not below `least`."""
        gains = islice(self._begin(root, budget), num_drafted)
        return [*takewhile(lambda gain: gain >= least, gains)]

    def take(self, num_drafted: int) -> DraftTree:
        """Return the tree of the first nodes offered."""
        assert self._growth is not None
        return self._growth.tree(num_drafted)

    def _begin(self, root: int, budget: DraftBudget) -> Growth[int]:
        self._growth = growth = Growth(
            root, root, self._at, lambda _, token: token, budget.max_depth, budget.chain_only
        )
        return growth

    def learn(self, acceptance: Acceptance, order: Sequence[int]) -> None:
        """Learn acceptance from the last tree, append the new tokens, and write the rows of nodes in this order."""
        if self._growth:
            self._growth.teach(self._rates, acceptance)
            self._growth = None
        self.append(acceptance.tokens)
        (token_ids, logits), k = acceptance.candidates, self._matrix.shape[1]
        for node in order:
            self._write(acceptance.node_tokens[node], token_ids[node][:k], logits[node][:k])

    def write(
        self,
        tokens: Sequence[int],
        successors: Sequence[Sequence[int]],
        logits: Sequence[Sequence[float]],
    ) -> None:
        """Write rows of tokens, one by one: k successors each, and the codes of their probabilities."""
        for row in zip(tokens, successors, logits, strict=True):
            self._write(*row)

    def _write(self, token: int, successors: Sequence[int], logits: Sequence[float]) -> None:
        if not self._is_average or not self._codes[token, 0]:
            self._matrix[token] = successors
            self._codes[token] = probability_codes(logits)
            return
        known = [CENTRES[code - 1] for code in self._codes[token].tolist()]
        shares: dict[int, float] = {}
        for row, of_row in (
            (self._matrix[token].tolist(), known),
            (successors, probabilities(logits)),
        ):
            for successor, share in zip(row, of_row, strict=True):
                shares[successor] = shares.get(successor, 0.0) + share
        # Of equal shares the one that was known or came first.
        likeliest = sorted(shares, key=shares.__getitem__, reverse=True)[: len(successors)]
        self._matrix[token] = likeliest
        self._codes[token] = codes_of([shares[successor] for successor in likeliest])

    def _at(self, token: int) -> list[Guess]:
        """Return the guesses in a token's row of the matrix, the most probable first."""
        codes = self._codes[token].tolist()
        if not codes[0]:
            return []
        guesses = []
        for rank, (successor, code) in enumerate(
            zip(self._matrix[token].tolist(), codes, strict=True)
        ):
            level = self._text.level(token, successor)
            kind = (rank * len(CENTRES) + code - 1) * NUM_LEVELS + level
            guesses.append((self._rates.rates[kind], successor, kind))
        guesses.sort(reverse=True)
        return guesses

    def reset(self) -> None:
        """Forget everything."""
        self._codes.fill(0)
        self._rates.reset()

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the codes, uint8 [V, k], and the learned rates, float64 [2, kinds]."""
        return {"codes": torch.from_numpy(self._codes.copy()), "rates": self._rates.state()}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a `memory`."""
        self._rates.load_state(tensors["rates"])
        self._codes[:] = tensors["codes"].numpy()
