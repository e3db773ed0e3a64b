"""The levels of a tree template, for heads that guess a level from the one before it.

Shapes: p nodes with children.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ..growth.tree_template import TreeTemplate


class Level(NamedTuple):
    """One level of a tree, as indices on the device."""

    num_guesses: int  # k, so that all ranks are there
    readers: torch.Tensor  # nodes of the level that have children [p], among the nodes of the level
    parents: torch.Tensor  # for each node of the next level, its parent among the readers
    ranks: torch.Tensor  # for each node of the next level, its rank among its parent's guesses


@lru_cache(maxsize=256)
def levels_of(tree: TreeTemplate, device: torch.device) -> list[Level]:
    """Return the levels of a template but the last, whose nodes have no children; kept by template and device."""
    topology, found = tree.topology, []
    for nodes, below in zip(topology.levels, topology.levels[1:], strict=False):
        readers = [node for node in nodes if topology.children[node]]
        ranks = [tree.ranks[node] for node in below]
        indices = (
            [nodes.index(node) for node in readers],
            [readers.index(topology.parents[node]) for node in below],
            ranks,
        )
        rows = (torch.tensor(each, device=device) for each in indices)
        found.append(Level(1 + max(ranks), *rows))
    return found
