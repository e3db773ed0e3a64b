"""The draft of Goose: a chain from the root, the spine, with branches at the root and at every spine node.

Algorithm 1 of the paper: the spine takes its share of the nodes; the rest goes by halves to the root
and to the spine nodes, of these most to the first ones; what is left grows the branches level by level.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .successors import SuccessorTable

# Successors with a smaller share are not drafted.
LEAST_SHARE = 0.01
# Part of the branches that hangs from the spine (rho); the rest hangs from the root.
SPINE_BRANCHES = 0.5


class Limits(NamedTuple):
    """Limits of a tree."""

    num_nodes: int  # nodes, root included (B)
    num_spine: int  # nodes of the spine, at most
    branch_depth: int  # depth from which on no branch grows; one may begin deeper
    depth: int  # of the deepest node allowed
    width: int  # successors in a row (K), which bounds how broad a branch grows


class SpineTree:
    """A draft under construction, with the token `before` its root; nodes 1 to `num_spine` are the spine."""

    def __init__(self, table: SuccessorTable, before: int, root: int, limits: Limits) -> None:
        self._table, self._before, self._limits = table, before, limits
        self.tokens, self.parents = [root], [-1]
        self._depths = [0]
        self.num_spine = 0
        self._growing: deque[tuple[int, float]] = (
            deque()
        )  # leaves, with the share they were drafted at

    @property
    def sources(self) -> tuple[str, ...]:
        """Source of each node: the text's own past or the table."""
        num_others = len(self.tokens) - 1 - self.num_spine
        return ("text",) * (1 + self.num_spine) + ("rows",) * num_others

    def grow(self, chain: Sequence[int]) -> None:
        """Build the tree around a chain from the text."""
        limits = self._limits
        for token in chain[: min(limits.num_spine, limits.depth)]:
            self._add(token, self.num_spine)
            self.num_spine += 1
        num_left = limits.num_nodes - 1 - self.num_spine
        at_spine = 0
        if self.num_spine and num_left > 0:
            at_spine = max(1, int(num_left * SPINE_BRANCHES))
        self._attach(0, num_left - at_spine, chain[0] if chain else None)
        for node, most in enumerate(falling_shares(at_spine, self.num_spine), start=1):
            self._attach(node, most, chain[node] if node < self.num_spine else None)
        self._grow_branches()

    def _grow_branches(self) -> None:
        """Hang successors from the branches, the first ones first, more of them from a likelier one."""
        limits = self._limits
        while self._growing and (num_left := limits.num_nodes - len(self.tokens)) > 0:
            node, share = self._growing.popleft()
            broadest = max(1, limits.width // self._depths[node])
            self._attach(node, min(max(1, math.ceil(num_left * share)), broadest, num_left))

    def _attach(self, node: int, most: int, drafted: int | None = None) -> None:
        """Hang the likeliest successors from a node: at most `most`, without one that is drafted there."""
        if self._depths[node] >= self._limits.depth:
            return
        before = self.tokens[self.parents[node]] if node else self._before
        num_added = 0
        for token, share in self._table.after(before, self.tokens[node]):
            if num_added >= most or share < LEAST_SHARE:
                break
            if token == drafted:
                continue
            child = self._add(token, node)
            num_added += 1
            if self._depths[child] < self._limits.branch_depth:
                self._growing.append((child, share))

    def _add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        return len(self.tokens) - 1


def falling_shares(total: int, num_places: int) -> list[int]:
    """Split `total` in proportion to 1, 1/2, 1/3 and so on, at least 1 a place until it is spent."""
    weights = [1.0 / place for place in range(1, num_places + 1)]
    whole = sum(weights)
    shares: list[int] = []
    for weight in weights:
        shares.append(min(max(1, int(total * weight / whole)), total - sum(shares)))
    return shares
