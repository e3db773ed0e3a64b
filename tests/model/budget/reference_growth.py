"""Best-first growth in simple Python: the reference for `best_first.h`.

A drafter says, for a node's context, which tokens may follow and how probable each is. A node is
accepted if its whole path is, so that its probability is the product along the path. Growing in the
order of these probabilities gives nested trees: the first n nodes are the best tree of n nodes, and
the number to keep can be chosen while growing (`model.engine.budget`).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Generic, TypeVar

from model.budget.acceptance import AcceptanceRates
from model.budget.best_first import MINUS_EDGES
from model.engine.tree import DraftTree
from model.engine.verification import Acceptance

Context = TypeVar("Context")


# The probability that a token follows a node, the token, and which kind of guess it is (an index
# into `AcceptanceRates`). Plain tuples: thousands are made a second.
Guess = tuple[float, int, int]


class Growth(Generic[Context]):
    """A draft tree that grows while it is iterated.

    Args:
        root_token: last committed token.
        root: the root's context.
        guesses: the guesses at a context, the most probable first.
        follow: the context after one more token.
        max_depth: deepest node allowed.
        chain_only: whether every node may have one child at most.

    Attributes:
        tokens: token ids, the root's first.
        parents: parent of each node; -1 for the root.
    """

    def __init__(
        self,
        root_token: int,
        root: Context,
        guesses: Callable[[Context], Sequence[Guess]],
        follow: Callable[[Context, int], Context],
        max_depth: int,
        chain_only: bool = False,
    ) -> None:
        self.tokens = [root_token]
        self.parents = [-1]
        self._kinds = [0]
        self._contexts: list[Context | None] = [root]
        self._depths = [0]
        self._guesses = guesses
        self._follow = follow
        self._max_depth = max_depth
        self._chain_only = chain_only
        self._order: list[int] = []  # of each node of the tree, its number here

    def tree(self, num_drafted: int, sources: Sequence[str] | None = None) -> DraftTree:
        """Return the tree of the root and the first drafted nodes.

        Args:
            num_drafted: drafted nodes.
            sources: where guesses of each kind come from; None where all have one source.
        """
        # Depth first: the same shape, grown in another order, is the same topology, and the likeliest path stays
        # where it is in the cache when it is accepted.
        children: list[list[int]] = [[] for _ in range(1 + num_drafted)]
        for node in range(num_drafted, 0, -1):
            children[self.parents[node]].append(node)
        order: list[int] = []
        parents: list[int] = []
        places = [-1] * (2 + num_drafted)  # by node; the last is that of the root's parent
        waiting = [0]
        while waiting:
            node = waiting.pop()
            places[node] = len(order)
            order.append(node)
            parents.append(places[self.parents[node]])
            waiting += children[node]
        self._order = order
        tokens = [self.tokens[node] for node in order]
        names = tuple([sources[self._kinds[node]] for node in order]) if sources else None
        return DraftTree.from_lists(tokens, tuple(parents), names)

    def teach(self, rates: AcceptanceRates, acceptance: Acceptance) -> None:
        """Teach the rates every guess after an accepted node, drafted or only considered."""
        path = (self._order[node] for node in acceptance.path)
        following = dict(zip(path, acceptance.tokens, strict=False))
        for node in range(1, len(self.tokens)):
            token = following.get(self.parents[node])
            if token is not None:
                rates.learn(self._kinds[node], token == self.tokens[node])

    def __iter__(self) -> Iterator[float]:
        """Add node after node; yield the probability that each is accepted, in falling order."""
        # (minus the probability, running number, parent, its probability, its guesses, which one). No
        # child is more probable than its parent, which therefore waits with its own probability until
        # its guesses are needed: most of a tree's last nodes never are.
        heap: list[tuple[float, int, int, float, Sequence[Guess] | None, int]] = []
        number = count()
        if self._max_depth > 0:
            heap.append((-1.0, next(number), 0, 1.0, None, 0))
        while heap:
            negative, _, parent, reached, guesses, index = heapq.heappop(heap)
            if guesses is None:
                guesses = self._guesses(self._context_of(parent))
                if guesses:
                    entry = (-reached * guesses[0][0], next(number), parent, reached, guesses, 0)
                    heapq.heappush(heap, entry)
                continue
            _, token, kind = guesses[index]
            node = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self._kinds.append(kind)
            self._contexts.append(None)
            self._depths.append(self._depths[parent] + 1)
            yield -negative
            if index + 1 < len(guesses) and not self._chain_only:
                probability = reached * guesses[index + 1][0]
                entry = (-probability, next(number), parent, reached, guesses, index + 1)
                heapq.heappush(heap, entry)
            if self._depths[node] < self._max_depth:
                heapq.heappush(heap, (negative, next(number), node, -negative, None, 0))

    def _context_of(self, node: int) -> Context:
        """Return a node's context, which nodes that are never asked for guesses do not need."""
        context = self._contexts[node]
        if context is None:
            parent = self._context_of(self.parents[node])
            context = self._contexts[node] = self._follow(parent, self.tokens[node])
        return context


def probability_codes(logits: Sequence[float]) -> list[int]:
    """Return the codes of the k largest logits' probabilities among themselves; the largest is first."""
    return codes_of(_weights(logits))


def codes_of(weights: Sequence[float]) -> list[int]:
    """Return the codes of probabilities that are to each other as these weights."""
    minus_total = -_total(weights)
    return [1 + bisect_left(MINUS_EDGES, weight / minus_total) for weight in weights]


def probabilities(logits: Sequence[float]) -> list[float]:
    """Return the probabilities of the k largest logits among themselves; the largest is first."""
    weights = _weights(logits)
    total = _total(weights)
    return [weight / total for weight in weights]


def _weights(logits: Sequence[float]) -> list[float]:
    return [math.exp(logit - logits[0]) for logit in logits]


def _total(weights: Sequence[float]) -> float:
    total = 0.0
    for weight in weights:  # one by one: `sum` rounds otherwise from Python 3.12 on
        total += weight
    return total
