"""A draft tree as recurrences read it: depth by depth, each node from its parent's state.

Shapes: N nodes, n nodes of one depth, K inputs that a convolution sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch


class Level(NamedTuple):
    """The nodes of one depth, in an order in which the nodes of each depth are neighbours."""

    begin: int  # their places in that order
    end: int
    parents: (
        torch.Tensor
    )  # for each, the place of its parent within the level above [n]; 0 for the root


class LevelTree:
    """A tree's nodes, level by level: from the parents of each, and the nodes of each depth, in order."""

    def __init__(
        self, parents: Sequence[int], levels: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self.num_nodes = len(parents)
        self._parents = parents
        self._device = device
        self._inputs: dict[int, torch.Tensor] = {}
        self._order = [node for nodes in levels for node in nodes]
        self._place = {node: place for place, node in enumerate(self._order)}
        self._depth = {node: depth for depth, nodes in enumerate(levels) for node in nodes}
        self.levels = []
        begin = above = 0
        for nodes in levels:
            places = [self._place[parents[node]] - above if node else 0 for node in nodes]
            end = begin + len(nodes)
            self.levels.append(Level(begin, end, torch.tensor(places, device=device)))
            begin, above = end, begin

    def place_of(self, node: int) -> tuple[int, int]:
        """Return a node's depth, and its place among the nodes of that depth."""
        depth = self._depth[node]
        return depth, self._place[node] - self.levels[depth].begin

    def path_to(self, node: int) -> list[int]:
        """Return the places, in the order of the levels, of the nodes from the root to this one."""
        path = []
        while node >= 0:
            path.append(self._place[node])
            node = self._parents[node]
        return path[::-1]

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
