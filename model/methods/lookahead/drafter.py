"""Lookahead decoding: a Jacobi window makes n-grams, a pool keeps them, and matching ones are guessed.

Window and guesses are one draft tree. The window has W columns and N-1 rows (N is the n-gram's
length, `level`). Row 0 is a chain under the root: column 0 is the root itself, column j hangs from
column j-1. Node (row i, column j) hangs from (row i-1, column j). The prediction after the last row
of a column completes an n-gram of the pool. Every step moves the window on by one position. Guesses
are the pool's n-grams that begin with the root's token, chains under the root; with several alike
the longest accepted path wins.

Source: Y. Fu et al., Break the Sequential Dependency of LLM Inference Using Lookahead Decoding,
arXiv 2402.02057 (W -> `window`, N -> `level`, G -> `guess`); defaults are Spec-Bench's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from ...budget.acceptance import Backoff
from ...budget.paced import CostAwareDrafter
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import VerifiedStep
from ...engine.tree import DraftTree
from ...options import Options, budget_option, option

# For the automatic budget: the initial mean of accepted drafted tokens per step, and the steps it averages over.
FIRST_GAIN, MEMORY = 1.0, 32


@dataclass(frozen=True, slots=True)
class LookaheadConfig(Options):
    level: int = option(5, "length N of the n-grams", least=2)
    window: int = option(7, "columns W of the Jacobi window", least=1)
    guess: int = option(7, "n-grams G verified in a step, and kept for each token", least=1)
    budget: str = budget_option("fixed")

    def _check(self) -> None:
        if self.num_drafted > MAX_DRAFT:
            raise ValueError(
                f"level, window, guess: got {self.level}, {self.window}, {self.guess}, a draft of "
                f"{self.num_drafted} nodes, (level - 1) * (level - 2 + window + guess); allowed: at most "
                f"{MAX_DRAFT}; give less"
            )

    @property
    def num_drafted(self) -> int:
        """Nodes of the largest draft, without the root."""
        return (self.level - 1) * (self.level - 2 + self.window + self.guess)


class _Nodes(NamedTuple):
    """Nodes of a tree: tokens, parents, and the last row's node of each window column."""

    tokens: list[int]
    parents: list[int]
    last_nodes: list[int]


class _Gain:
    """Mean of the drafted tokens that a step with a draft accepted lately."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.mean = FIRST_GAIN

    def learn(self, num_accepted: int) -> None:
        self.mean += (num_accepted - self.mean) / MEMORY


class LookaheadDrafter(CostAwareDrafter):
    config_class = LookaheadConfig
    auto_options = MappingProxyType({"budget": "auto"})

    def __init__(self, config: LookaheadConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self.max_nodes = 1 + config.num_drafted
        self._rows: list[list[int]] = []
        # first token -> the N-1 tokens that follow it in an n-gram, the latest last
        self._pool: dict[int, list[tuple[int, ...]]] = {}
        self._last_nodes: list[int] = []
        self.wants_costs = config.budget == "auto"
        self._gain, self._backoff = _Gain(), Backoff()

    def reset(self) -> None:
        """Forget the learned gain; the window and the pool belong to one text and `start` clears them."""
        self._gain.reset()
        self._backoff.reset()

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Fill the pool from the prompt and begin a window of random prompt tokens (from a fixed seed)."""
        level = self.config.level
        self._pool = {}
        for begin in range(len(prompt_ids) - level + 1):
            self._add_ngram(prompt_ids[begin], tuple(prompt_ids[begin + 1 : begin + level]))
        # One more column for every row still to fill: each step that adds a row drops a column.
        num_columns = self.config.window + level - 3
        self._rows = [random.Random(0).choices(prompt_ids, k=num_columns)]

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return window and guesses; only the best guess if the model verifies chains only."""
        tokens, parents, last_nodes = self._nodes(context[-1], budget)
        cost_curve = budget.cost_curve
        if cost_curve:
            # Window and guesses pay as a whole, or not: they cannot be drafted in part.
            rate = (1.0 + self._gain.mean) / cost_curve.of(len(tokens))
            if not self._backoff.allow(rate > 1.0 / cost_curve.milliseconds[0]):
                tokens, parents, last_nodes = tokens[:1], parents[:1], []
        self._last_nodes = last_nodes
        return DraftTree.from_lists(tokens, tuple(parents))

    def _nodes(self, root: int, budget: DraftBudget) -> _Nodes:
        guesses = [guess[: budget.max_depth] for guess in self._pool.get(root, [])]
        if budget.chain_only:
            tokens = [root, *(guesses[-1] if guesses else ())]
            return _Nodes(tokens, list(range(-1, len(tokens) - 1)), [])
        window = self._window_within(budget.max_depth)
        tokens, parents = [root, *window.tokens], [-1, *window.parents]
        for guess in guesses:
            parent = 0
            for token in guess:
                parents.append(parent)
                parent = len(tokens)
                tokens.append(token)
        return _Nodes(tokens, parents, window.last_nodes)

    def observe(self, step: VerifiedStep) -> None:
        """Move the window on by one position; a full window gives W new n-grams."""
        if step.tree.topology.num_nodes > 1:
            self._gain.learn(len(step.acceptance.tokens) - 1)
        if not self._last_nodes:
            return
        predictions = [step.acceptance.predictions[node] for node in self._last_nodes]
        if len(self._rows) < self.config.level - 1:
            self._rows = [row[1:] for row in self._rows] + [predictions[1:]]
            return
        heads = [step.acceptance.node_tokens[0], *self._rows[0]]
        for head, *column in zip(heads, *self._rows[1:], predictions, strict=True):
            self._add_ngram(head, tuple(column))
        self._rows = [*self._rows[1:], predictions]
        self._rows[0] = self._rows[0][1:]

    def _window_within(self, max_depth: int) -> _Nodes:
        heads = self._rows[0]
        if len(heads) + len(self._rows) - 1 > max_depth:
            return _Nodes([], [], [])
        tokens = list(heads)
        parents = list(range(len(heads)))
        last_nodes = list(range(len(heads) + 1))  # row 0: the root, then the chain of heads
        for row in self._rows[1:]:
            first = len(tokens) + 1
            tokens += row
            parents += last_nodes
            last_nodes = list(range(first, first + len(row)))
        return _Nodes(tokens, parents, last_nodes)

    def _add_ngram(self, first: int, rest: tuple[int, ...]) -> None:
        """Put an n-gram last in its token's list; the oldest leaves when there are more than G."""
        known = self._pool.setdefault(first, [])
        if rest in known:
            known.remove(rest)
        known.append(rest)
        if len(known) > self.config.guess:
            known.pop(0)
