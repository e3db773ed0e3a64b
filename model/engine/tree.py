"""Draft trees: the guesses of a drafter, verified in one forward pass.

A draft is a tree of token ids. Node 0 is the root: the last committed token, whose key and value
are not in the KV cache yet. Every other node guesses the token that follows its parent. A chain is
a tree, and "no draft" is the root alone, so vanilla and every speculative method share one
representation.

Shapes: N nodes (root included), D depth of the deepest node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ..machine.hardware import uploaded

# Token of a node that guesses nothing: no token equals it, so that it is never accepted.
PROBE = -1


class TreeTopology:
    """The shape of a draft tree: the parents, and everything derived from them.

    Built once for a static template and reused, so that its tensors are constants. Use
    `TreeTopology.from_parents`, which returns the same object for the same parents.

    Args:
        parents: `parents[n]` is the index of node n's parent; -1 for the root (node 0). Parents
            come before their children.

    Raises:
        ValueError: if node 0 is not the root, or a parent does not precede its child.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        if not parents or parents[0] != -1:
            raise ValueError(
                f"parents: node 0 must be the root with parent -1, got {list(parents[:1])}"
            )
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"parents: node {node} has parent {parent}; allowed: an earlier node, 0 to {node - 1}"
                )
        self.parents = tuple(parents)
        self._on_device: dict[tuple[str, torch.device, torch.dtype | None], torch.Tensor] = {}

    # Room for all 429 trees of eight nodes; larger trees rarely repeat.
    @staticmethod
    @lru_cache(maxsize=512)
    def from_parents(parents: tuple[int, ...]) -> TreeTopology:
        """Return the topology with these parents, shared by all callers."""
        return TreeTopology(parents)

    @staticmethod
    def chain(num_nodes: int) -> TreeTopology:
        """Return the chain of `num_nodes` nodes, root included (1: the root alone)."""
        return TreeTopology.from_parents(tuple(range(-1, num_nodes - 1)))

    @property
    def num_nodes(self) -> int:
        """Number of nodes N, root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root; the root has depth 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 when there is no draft."""
        return max(self.depths)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node has at most one child (the root alone is a chain)."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def check(self, max_depth: int, chain_only: bool, max_nodes: int) -> None:
        """Raise ValueError if the tree exceeds a budget: a drafter's bug, not a user's mistake."""
        if self.num_nodes > max_nodes:
            raise ValueError(f"draft of {self.num_nodes} nodes; allowed: max_nodes={max_nodes}")
        if self.max_depth > max_depth:
            raise ValueError(f"draft of depth {self.max_depth}; allowed: at most {max_depth}")
        if chain_only and not self.is_chain:
            raise ValueError("draft branches; this model verifies chains only")

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node in node order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of each depth, in node order."""
        levels: list[list[int]] = [[] for _ in range(self.max_depth + 1)]
        for node, depth in enumerate(self.depths):
            levels[depth].append(node)
        return tuple(map(tuple, levels))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Place of each node among its siblings, from 0, in node order; the root's is 0."""
        num_before = [0] * self.num_nodes
        ranks = [0]
        for parent in self.parents[1:]:
            ranks.append(num_before[parent])
            num_before[parent] += 1
        return tuple(ranks)

    @cached_property
    def ancestor_mask(self) -> torch.Tensor:
        """Boolean [N, N]: row n is True at n and at every ancestor of n."""
        # numpy: a topology may be new at every step, and its row operations cost a tenth of
        # torch's.
        mask = np.eye(self.num_nodes, dtype=bool)  # [N, N]
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return torch.from_numpy(mask)

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def depth_tensor(self, device: torch.device) -> torch.Tensor:
        """Return the depths as int64 [N] on `device`; the same tensor on every call."""
        key = ("depths", device, None)
        if key not in self._on_device:
            self._on_device[key] = uploaded(self.depths, device)
        return self._on_device[key]

    def additive_mask(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return [N, N]: 0 where a node sees itself or an ancestor, the lowest finite number
        elsewhere.
        """
        key = ("mask", device, dtype)
        if key not in self._on_device:
            mask = np.where(self.ancestor_mask.numpy(), 0.0, torch.finfo(dtype).min)
            self._on_device[key] = uploaded(torch.from_numpy(mask).to(dtype), device)
        return self._on_device[key]


class Drawn(NamedTuple):
    """The distribution from which the children of a node were drawn, in their order and none twice."""

    token_ids: Sequence[int]  # children's tokens among them
    probabilities: Sequence[float]  # of these tokens; their sum is 1


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Token ids over a topology.

    Attributes:
        token_ids: int64 [N], on the host, or on the model's device if they were drafted there;
            `token_ids[0]` is the last committed token.
        topology: the shape of the tree, N nodes.
        sources: name of each node's source [N], unused for the root; None if the drafter has one source.
        probe: the embedding [D], on the model's device, as which the model reads the nodes of token `PROBE`; None
            if there are none.
        drawn: for each node whose children were drawn, from what, so that sampling accepts them more often
            (`model.engine.draws`); None: children are guesses.
    """

    token_ids: torch.Tensor
    topology: TreeTopology
    sources: tuple[str, ...] | None = None
    probe: torch.Tensor | None = None
    drawn: Mapping[int, Drawn] | None = None

    @classmethod
    def from_lists(
        cls, tokens: Sequence[int], parents: tuple[int, ...], sources: tuple[str, ...] | None = None
    ) -> DraftTree:
        """Build a tree from host lists of equal length N (root first)."""
        return cls(_on_host(tokens), TreeTopology.from_parents(parents), sources)

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """Build a chain: the root token followed by its guessed continuation."""
        return cls(_on_host(tokens), TreeTopology.chain(len(tokens)))

    @classmethod
    def star(cls, tokens: Sequence[int]) -> DraftTree:
        """Build a star: all nodes but the root hang from it, so that any number fits every context."""
        return cls.from_lists(tokens, (-1, *[0] * (len(tokens) - 1)))


def _on_host(tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor(tokens, device="cpu")
