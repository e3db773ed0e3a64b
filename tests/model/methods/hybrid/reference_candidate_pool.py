"""The candidate pool of the hybrid in simple Python.

The reference for `candidate_pool.cpp`, equal in every node and number.

Shapes: N nodes, C tokens of a prompt chunk, k tokens in a row, S logit samples, V vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np
import torch

from model.budget.acceptance import AcceptanceRates
from model.budget.best_first import ANY_TOKEN, MINUS_EDGES, Guesses
from model.engine.budget import DraftBudget
from model.engine.tree import DraftTree
from model.engine.verification import Acceptance
from model.methods.hybrid.candidate_pool import (
    FIRST_FREQUENT,
    FIRST_GUIDED,
    FREQUENT_PRIORS,
    GUIDE_OFFSET,
    GUIDE_SLOPE,
    IN_TEXT_WEIGHT,
    KIND_CENTRES,
    KIND_SOURCES,
    MATCH_WEIGHTS,
    NEIGHBOUR_WEIGHTS,
    NUM_BUCKETS,
    ROW_WEIGHTS,
)
from model.methods.hybrid.tables import LONGEST_KEY as LONGEST_ROW_KEY
from model.methods.hybrid.tables import NOBODY, NUM_CODES
from tests.model.budget.reference_growth import Growth, Guess
from tests.model.methods.hybrid.reference_suffix_index import LONGEST_KEY, Match, SuffixIndex
from tests.model.methods.hybrid.reference_tables import (
    ReferenceFrequentTokens,
    ReferenceNeighbours,
    ReferenceRowTables,
    row_of,
    states_of,
)


class _Context(NamedTuple):
    """The context on which a node's guesses depend.

    Attributes:
        last: last tokens of its path, itself included, at most `LONGEST_KEY`.
        match: the earlier place in the text that agrees with them.
        neighbour: the record of the last token with the most similar state before it, if any; its
            state after the token is used for the node's, which is not known yet.
        likeness: similarity of the two states.
        guided: the node of the guide's tree, if it is there.
    """

    last: tuple[int, ...]
    match: Match | None
    neighbour: int = NOBODY
    likeness: int = 0
    guided: int | None = None


class ReferencePool:
    """All sources, and the learned acceptance of their guesses.

    Args:
        num_slots: slots of the table of rows.
        k: tokens in a row.
        vocab_size: V.
        num_neighbours: records that are compared for a node; 0: none.
    """

    def __init__(self, num_slots: int, k: int, vocab_size: int, num_neighbours: int = 0) -> None:
        self._k = k
        self._vocab_size = vocab_size
        self.tables = ReferenceRowTables(num_slots, k)
        self.neighbours = ReferenceNeighbours(num_neighbours, k, vocab_size)
        self._end: np.ndarray | None = None  # state after the text's last token but one, if known
        self._centres = KIND_CENTRES + FREQUENT_PRIORS + KIND_CENTRES
        self._rates = AcceptanceRates(self._centres)
        self._guide: Guesses | None = None
        self._frequent = ReferenceFrequentTokens(vocab_size)
        self._index = SuffixIndex()

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a text: index the prompt."""
        self._index = SuffixIndex(prompt_ids)
        self._end = None
        self._guide = None

    def guide(self, guesses: Guesses) -> None:
        """Take what a guide says after the text, until the text goes on."""
        self._guide = guesses

    def write_rows(
        self,
        text: Sequence[int],
        begin: int,
        token_ids: Sequence[Sequence[int]],
        logits: Sequence[Sequence[float]],
        logit_samples: torch.Tensor | None = None,
    ) -> None:
        """Write rows for the tokens of a text from `begin` on: k tokens and logits each; logit samples [C, S]."""
        rows = [row_of(*row) for row in zip(token_ids, logits, strict=True)]
        for end, row in zip(range(begin + 1, len(text) + 1), rows, strict=True):
            self.tables.write(tuple(text[max(0, end - LONGEST_ROW_KEY) : end]), row)
        if logit_samples is not None:
            states = states_of(logit_samples)
            self._add(text[begin:], range(-1, len(rows) - 1), states, rows)
            self._end = states[-1]

    def grow(self, root: int, num_nodes: int, budget: DraftBudget) -> DraftTree:
        """Return the tree of the most probable nodes: as many as are worth their cost, at most
        `num_nodes` drafted.
        """
        growth = self._begin(root, budget)
        gains = islice(growth, num_nodes)
        num_drafted = (
            budget.cost_curve.best_size(gains) if budget.cost_curve else sum(1 for _ in gains)
        )
        return growth.tree(num_drafted, KIND_SOURCES)

    def offer(self, root: int, num_nodes: int, budget: DraftBudget, least: float) -> list[float]:
        """Grow the tree of the most probable nodes; return the probabilities that are not below `least`."""
        gains = islice(self._begin(root, budget), num_nodes)
        return [*takewhile(lambda gain: gain >= least, gains)]

    def take(self, num_nodes: int) -> DraftTree:
        """Return the tree of the first nodes offered."""
        return self._growth.tree(num_nodes, KIND_SOURCES)

    def _begin(self, root: int, budget: DraftBudget) -> Growth[_Context]:
        self._growth = Growth(
            *(root, self._context_at_end(), self._guesses, self._follow),
            *(budget.max_depth, budget.chain_only),
        )
        return self._growth

    def learn(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn from the last tree: acceptance of its guesses, rows (the accepted path's last), and new tokens."""
        self._growth.teach(self._rates, acceptance)
        tokens, parents = acceptance.node_tokens, tree.topology.parents
        contexts = [tuple(self._index.text[-LONGEST_ROW_KEY:])]
        for node in range(1, len(tokens)):
            contexts.append((*contexts[parents[node]][1 - LONGEST_ROW_KEY :], tokens[node]))
        (token_ids, logits), k = acceptance.candidates, self._k
        rows = [row_of(ids[:k], of_ids[:k]) for ids, of_ids in zip(token_ids, logits, strict=True)]
        # Of equal contexts the last written wins.
        for node in acceptance.accepted_last(tree.topology):
            self.tables.write(contexts[node], rows[node])
        end = None
        if acceptance.logit_samples is not None:
            states = states_of(acceptance.logit_samples)
            self._add(tokens, parents, states, rows)
            end = states[acceptance.path[-1]]
        self.append(acceptance.tokens)
        self._end = end

    def append(self, tokens: Iterable[int]) -> None:
        """Append new tokens of the text whose states are unknown."""
        tokens = list(tokens)
        self._index.append(tokens)
        self._frequent.append(tokens)
        self._end = None
        if tokens:
            self._guide = None

    def reset(self) -> None:
        """Forget the rows, the states and the learned acceptance."""
        self.tables.reset()
        self.neighbours.reset()
        self._rates.reset()
        self._frequent.reset()
        self._end = None

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the rows, the states, the learned acceptance and the counts of tokens."""
        learned = {"rates": self._rates.state(), "counts": self._frequent.counts.clone()}
        return {**self.tables.memory(), **self.neighbours.memory(), **learned}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a `memory`, as a whole or, if anything does not fit, not at all.

        Raises:
            ValueError: if shapes or values do not fit.
        """
        self.tables.check_memory(tensors, self._vocab_size)
        self.neighbours.check_memory(tensors)
        self._rates.load_state(tensors["rates"])  # which checks it, too
        self._frequent.load_state(tensors["counts"])
        self.tables.load_memory(tensors)
        self.neighbours.load_memory(tensors)
        self._end = None

    def _add(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        states: np.ndarray,
        rows: Sequence[Sequence[int]],
    ) -> None:
        """Add records of nodes after the end of the text: N tokens, parents, states [N, S] and rows."""
        for token, parent, after, row in zip(tokens, parents, states, rows, strict=True):
            before = self._end if parent < 0 else states[parent]
            if before is not None:
                self.neighbours.add(token, before, after, row)

    def _context_at_end(self) -> _Context:
        last = tuple(self._index.text[-LONGEST_KEY:])
        found = self.neighbours.find(last[-1], self._end)
        return _Context(last, self._index.match_end(), *found, 0 if self._guide else None)

    def _guesses(self, context: _Context) -> list[Guess]:
        """Pool the candidates of all sources for the token after a context."""
        weights: dict[int, float] = {}
        for row in self.tables.find(context.last[-LONGEST_ROW_KEY:]):
            for entry in row:
                token = entry // NUM_CODES
                weight = ROW_WEIGHTS[entry % NUM_CODES]
                weights[token] = weights[token] * weight if token in weights else weight
        if context.neighbour != NOBODY:
            of_likeness = NEIGHBOUR_WEIGHTS[context.likeness]
            for entry in self.neighbours.row(context.neighbour):
                token = entry // NUM_CODES
                weights[token] = weights.get(token, 1.0) * (
                    ROW_WEIGHTS[entry % NUM_CODES] * of_likeness
                )
        guided = self._row_of_guide(context)
        for token, log_probability in guided:
            weight = math.exp(GUIDE_OFFSET + GUIDE_SLOPE * log_probability)
            weights[token] = weights.get(token, 1.0) * weight
        named = {token for token, _ in guided}
        matching, kind_of_match = -1, 0
        if context.match:
            matching = self._index.text[context.match.position]
            step = min(context.match.length, len(MATCH_WEIGHTS) - 1)
            kind_of_match = NUM_BUCKETS * (2 if matching in weights else 1)
            weights[matching] = weights.get(matching, 1.0) * MATCH_WEIGHTS[step]
        rates = self._rates.rates
        if not weights:
            frequent = enumerate(self._frequent.top, FIRST_FREQUENT)
            return sorted(((rates[kind], token, kind) for kind, token in frequent), reverse=True)
        for token in weights.keys() & self._index.tokens:
            weights[token] *= IN_TEXT_WEIGHT
        total = 1.0  # "none of these"
        for weight in weights.values():  # one by one: `sum` rounds otherwise from Python 3.12 on
            total += weight
        guesses = []
        for token, weight in weights.items():
            probability = weight / total
            kind = bisect_left(MINUS_EDGES, -probability)
            if token == matching:
                kind += kind_of_match
            if token in named:
                kind += FIRST_GUIDED
            expected = probability * rates[kind] / self._centres[kind]
            guesses.append((expected if expected < 1.0 else 1.0, token, kind))
        guesses.sort(reverse=True)
        return guesses

    def _follow(self, context: _Context, token: int) -> _Context:
        """Return the context after one more token."""
        last = (*context.last, token)[-LONGEST_KEY:]
        match = self._index.follow(context.match, token, last)
        state = self.neighbours.after(context.neighbour)
        found = self.neighbours.find(token, state)
        return _Context(last, match, *found, self._child_of_guide(context.guided, token))

    def _row_of_guide(self, context: _Context) -> list[tuple[int, float]]:
        if self._guide is None or context.guided is None:
            return []
        rows, values = self._guide.rows, self._guide.log_probabilities
        return [*zip(rows[context.guided], values[context.guided], strict=True)]

    def _child_of_guide(self, node: int | None, token: int) -> int | None:
        if self._guide is None or node is None:
            return None
        nodes = zip(self._guide.parents, self._guide.tokens, strict=True)
        children = (
            child
            for child, (parent, own) in enumerate(nodes)
            if parent == node and own in (token, ANY_TOKEN)
        )
        return next(children, None)
