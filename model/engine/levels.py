"""A draft tree as recurrences read it: depth by depth, each node from its parent's state.

Shapes: N nodes, n nodes of one depth, K inputs that a convolution sees.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from .tree import TreeTopology


class Level(NamedTuple):
    """The nodes of one depth, in an order in which the nodes of each depth are neighbours."""

    begin: int  # their places in that order
    end: int
    # For each, the place of its parent within the level above [n]; 0 for the root.
    parents: torch.Tensor


class LevelTree:
    """A tree's nodes, level by level."""

    def __init__(self, topology: TreeTopology, device: torch.device) -> None:
        self.num_nodes = topology.num_nodes
        self._topology = topology
        self._device = device
        self._inputs: dict[int, torch.Tensor] = {}
        self._order = [node for nodes in topology.levels for node in nodes]
        self._place = {node: place for place, node in enumerate(self._order)}
        self.levels = []
        begin = above = 0
        for nodes in topology.levels:
            parents = (topology.parents[node] for node in nodes)
            places = [self._place.get(parent, above) - above for parent in parents]
            end = begin + len(nodes)
            self.levels.append(Level(begin, end, torch.tensor(places, device=device)))
            begin, above = end, begin

    def place_of(self, node: int) -> tuple[int, int]:
        """Return a node's depth, and its place among the nodes of that depth."""
        depth = self._topology.depths[node]
        return depth, self._place[node] - self.levels[depth].begin

    def path_to(self, node: int) -> list[int]:
        """Return the places, in the order of the levels, of the nodes from the root to this one."""
        return [self._place[each] for each in self._topology.path_to(node)]

    @cached_property
    def order(self) -> torch.Tensor | None:
        """The nodes in the order of the levels [N]; None if that is their own."""
        is_own = self._order == sorted(self._order)
        return None if is_own else torch.tensor(self._order, device=self._device)

    @cached_property
    def back(self) -> torch.Tensor | None:
        """The place of each node in the order of the levels [N]; None if that is their own."""
        return None if self.order is None else self.order.argsort()

    def inputs_of(self, node: int, num_inputs: int) -> list[int]:
        """Return the columns of the last K inputs up to a node, the node's own last.

        The K inputs before the tree are columns 0 to K - 1; the nodes follow, in the order of the levels.
        """
        of_path = [num_inputs + place for place in self.path_to(node)]
        return [*range(num_inputs), *of_path][-num_inputs:]

    def inputs(self, num_inputs: int) -> torch.Tensor:
        """Return the columns of the last K inputs up to each node, in the order of the levels [N, K]."""
        if num_inputs not in self._inputs:
            columns = [self.inputs_of(node, num_inputs) for node in self._order]
            self._inputs[num_inputs] = torch.tensor(columns, device=self._device)
        return self._inputs[num_inputs]


@lru_cache(maxsize=512)
def level_tree(topology: TreeTopology, device: torch.device) -> LevelTree:
    """Return a tree as recurrences read it, on a device; the same object on every call."""
    return LevelTree(topology, device)
