"""Draft trees grown best first: always the node that is most likely to be accepted.

A drafter says, for a node's context, which tokens may follow and how probable each is. A node is
accepted if its whole path is, so that its probability is the product along the path. Growing in the
order of these probabilities gives nested trees: the first n nodes are the best tree of n nodes, and
the number to keep can be chosen while growing (`model.budget.cost_model`).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Generic, TypeVar

import numpy as np
import torch

from ...engine.tree import DraftTree
from ...engine.verification import Acceptance

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

    def tree(
        self, num_drafted: int, device: torch.device, sources: Sequence[str] | None = None
    ) -> DraftTree:
        """Return the tree of the root and the first drafted nodes.

        Args:
            num_drafted: drafted nodes.
            device: of the token ids.
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
        return DraftTree.from_lists(tokens, tuple(parents), device, names)

    def teach(self, rates: AcceptanceRates, acceptance: Acceptance) -> None:
        """Say of every guess after an accepted node, drafted or only considered, if it came true."""
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


# Observations that a rate rests on, at most.
MEMORY = 400.0


class AcceptanceRates:
    """How often guesses of a kind came true, learned while decoding.

    Args:
        prior: the rate of each kind before anything is known of it.
        strength: how many observations the prior is worth.
        memory: observations that the estimate rests on; older ones fade, as the text changes.

    Attributes:
        array: the rates, and the observations they rest on, float64 [2, kinds], to write into.
        rates: the first row, whose numbers are read one by one in a third of numpy's time.
    """

    def __init__(
        self, prior: Sequence[float], strength: float = 8.0, memory: float = MEMORY
    ) -> None:
        self._prior = tuple(prior)
        self._strength = strength
        self._memory = memory
        self.array = np.empty((2, len(self._prior)))
        self.rates: memoryview[float] = memoryview(self.array[0].data)
        self._weights: memoryview[float] = memoryview(self.array[1].data)
        self.reset()

    def reset(self) -> None:
        """Forget what was observed."""
        self.array[:] = self._prior, [self._strength] * len(self._prior)

    def learn(self, kind: int, came_true: bool) -> None:
        """Take note of one guess."""
        weight = min(self._weights[kind] + 1.0, self._memory)
        self._weights[kind] = weight
        self.rates[kind] += (came_true - self.rates[kind]) / weight

    def state(self) -> torch.Tensor:
        """Return rates and weights, float64 [2, kinds]."""
        return torch.from_numpy(self.array.copy())

    def load_state(self, state: torch.Tensor) -> None:
        """Take over what `state` returned.

        Raises:
            ValueError: if it is not of as many kinds, or not rates and weights.
        """
        expected = (2, len(self._prior))
        if tuple(state.shape) != expected or state.dtype != torch.float64:
            raise ValueError(
                f"rates: got {state.dtype} of shape {list(state.shape)}; allowed: float64 of shape "
                f"{list(expected)}"
            )
        if not bool(((state[0] >= 0) & (state[0] <= 1) & (state[1] > 0)).all()):
            raise ValueError(
                "rates: got numbers that are no rates; allowed: 0 to 1, weights above 0"
            )
        self.array[:] = state.cpu().numpy()


# Probabilities are kept as codes: 0 is no row yet, b + 1 a probability in bucket b.
EDGES = (0.9, 0.75, 0.6, 0.45, 0.3, 0.2, 0.12, 0.07, 0.04, 0.02, 0.01, 0.004)
CENTRES = (0.95, 0.82, 0.67, 0.52, 0.37, 0.25, 0.155, 0.093, 0.055, 0.03, 0.015, 0.007, 0.002)
# Of minus a probability: these rise.
MINUS_EDGES = tuple(-edge for edge in EDGES)


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
