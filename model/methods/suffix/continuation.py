"""Continuations of a place in a suffix tree: the likeliest path, or the likeliest tree.

The probability of a drafted token is its count over the count of the match: the share of the match's
occurrences after which the text went on in this way. The score of a draft is the sum of them, the
number of tokens that are expected to be accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from .suffix_tree import Node, Place


@dataclass(slots=True)
class Continuation:
    """Tokens that may follow a match."""

    total: int = 1  # places of the match
    tokens: list[int] = field(default_factory=list)  # drafted tokens, parents before children
    # For each token the index of the one before it, -1 for the end of the match.
    parents: list[int] = field(default_factory=list)
    sum_of_counts: int = 0  # of the tokens

    @property
    def score(self) -> float:
        """Sum of the probabilities of the tokens; equal sums are equal numbers, however they came about."""
        return self.sum_of_counts / self.total

    def add_run(self, run: list[int], parent: int, count: int) -> int:
        """Append tokens one after another, and return the index of the last one."""
        for token in run:
            self.tokens.append(token)
            self.parents.append(parent)
            parent = len(self.tokens) - 1
        self.sum_of_counts += count * len(run)
        return parent


# Of a place, with at most so many tokens of at least such a probability.
Grow = Callable[[Place, int, float], Continuation]


def likeliest_path(place: Place, most: int, least_probability: float) -> Continuation:
    """Return the chain that takes the most frequent token each time."""
    node = place.node
    found = Continuation(node.count)
    parent = found.add_run(node.run(place.position, most), -1, node.count)
    while len(found.tokens) < most and node.ranked:
        node = node.ranked[0]
        if node.count / found.total < least_probability:
            break
        run = node.run(node.begin, most - len(found.tokens))
        parent = found.add_run(run, parent, node.count)
    return found


def likeliest_tree(place: Place, most: int, least_probability: float) -> Continuation:
    """Return the tree that takes the most frequent token each time, of equals the one found first."""
    found = Continuation(place.node.count)
    # (-count, order of discovery, node, where its run goes on, parent)
    queue: list[tuple[int, int, Node, int, int]] = [(-place.node.count, 0, *place, -1)]
    num_seen = 1
    while queue and len(found.tokens) < most:
        _, _, node, index, parent = heappop(queue)
        has_equals = bool(queue) and -queue[0][0] == node.count
        run = node.run(index, 1 if has_equals else most - len(found.tokens))
        parent = found.add_run(run, parent, node.count)
        index += len(run)
        following = (
            [(node, index)]
            if node.run(index, 1)
            else [(child, child.begin) for child in node.ranked]
        )
        for child, begin in following:
            if child.count / found.total < least_probability:
                break
            heappush(queue, (-child.count, num_seen, child, begin, parent))
            num_seen += 1
    return found
