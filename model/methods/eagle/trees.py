"""How a draft network's guesses become a tree: EAGLE's fixed shape, EAGLE-2's and EAGLE-3's by probability.

Both read a level at a time from the network (`text.Draft`).

Shapes: n nodes of a level, k guesses after each, Q tokens that can be drafted, m candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from .text import Draft

# Rank paths of EAGLE's tree, `mc_sim_7b_63` of its published code (SafeAILab/EAGLE,
# eagle/model/choices.py): (0, 2) is the third likeliest token after the likeliest one.
PATHS = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


class Grown(NamedTuple):
    """A tree without its root: tokens and parents of its nodes, 0 for the root, n for the n-th node."""

    tokens: list[int]
    parents: tuple[int, ...]


class Level(NamedTuple):
    """One level of a fixed shape.

    Attributes:
        parents: place of each node's parent among the nodes of the level before that have children.
        ranks: of each node among the guesses after its parent.
        inner: places of the nodes with children.
    """

    parents: list[int]
    ranks: list[int]
    inner: list[int]


class FixedShape:
    """A tree's shape as rank paths, level by level.

    Args:
        paths: rank paths, each with its ancestors.
    """

    def __init__(self, paths: Sequence[tuple[int, ...]]) -> None:
        ordered = sorted(paths, key=lambda path: (len(path), path))
        node_of = {(): 0} | {path: node for node, path in enumerate(ordered, start=1)}
        self.parents = tuple(node_of[path[:-1]] for path in ordered)
        with_children = {path[:-1] for path in ordered}
        self.levels: list[Level] = []
        before: list[tuple[int, ...]] = [()]
        for depth in range(1, 1 + max(map(len, ordered), default=0)):
            level = [path for path in ordered if len(path) == depth]
            inner = [place for place, path in enumerate(level) if path in with_children]
            parents = [before.index(path[:-1]) for path in level]
            self.levels.append(Level(parents, [path[-1] for path in level], inner))
            before = [level[place] for place in inner]


@lru_cache(maxsize=64)
def fixed_shape(num_nodes: int, max_depth: int, chain_only: bool) -> FixedShape:
    """Return EAGLE's tree, cut to a number of nodes and a depth; or the chain of its likeliest tokens.

    The paths with the smallest sum of ranks and steps stay, the shorter ones first.
    """
    paths = [path for path in PATHS if len(path) <= max_depth]
    if chain_only:
        paths = [path for path in paths if not any(path)]
    best = sorted(paths, key=lambda path: (sum(path) + len(path), len(path), path))
    return FixedShape(best[:num_nodes])


def grow_fixed(draft: Draft, shape: FixedShape) -> Grown:
    """Fill a fixed shape with the likeliest tokens."""
    found: list[torch.Tensor] = []
    for level in shape.levels:
        guesses = draft.logits.topk(1 + max(level.ranks), dim=-1).indices  # [n, k]
        token_ids = draft.token_ids(guesses[level.parents, level.ranks])
        found.append(token_ids)
        if level.inner:
            inner = torch.tensor(level.inner, device=token_ids.device)
            parents = torch.tensor(level.parents, device=token_ids.device)[inner]
            draft.deepen(parents, token_ids[inner])
    tokens = torch.cat(found).tolist() if found else []
    return Grown(tokens, shape.parents)


class Candidates(NamedTuple):
    """Nodes to choose from, all [m].

    Attributes:
        tokens: their token ids.
        scores: logarithms of the probabilities of their paths.
        parents: the candidate that each follows; -1 for the root.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


class Beam(NamedTuple):
    """The nodes of a level that are read: numbers among all candidates, and scores, both [n]."""

    numbers: torch.Tensor
    scores: torch.Tensor


def grow_likeliest(draft: Draft, num_nodes: int, depth: int, width: int) -> Grown:
    """Return the tree of the most probable nodes.

    On each level `width` nodes are read, those with the most probable paths, and the `width` likeliest
    tokens after each are candidates; of all candidates the `num_nodes` most probable are the tree.
    """
    device = draft.logits.device
    beam = Beam(torch.tensor([-1], device=device), draft.logits.new_zeros(1))
    levels: list[Candidates] = []
    num_before = 0
    for level in range(depth):
        found = _candidates(draft, beam, width)
        levels.append(found)
        if level == depth - 1:
            break
        num_found = len(found.scores)
        chosen = found.scores.topk(min(width, num_found)).indices
        draft.deepen(chosen // (num_found // len(beam.numbers)), found.tokens[chosen])
        beam = Beam(num_before + chosen, found.scores[chosen])
        num_before += num_found
    return _most_probable(levels, num_nodes)


def _candidates(draft: Draft, beam: Beam, width: int) -> Candidates:
    """Return the likeliest tokens after every node of the beam."""
    logits = draft.logits
    top = logits.log_softmax(dim=-1).topk(min(width, logits.shape[-1]), dim=-1)  # [n, k]
    lowest = torch.finfo(logits.dtype).min
    # Logits that are no numbers make no order.
    scores = (top.values + beam.scores[:, None]).nan_to_num(nan=lowest, neginf=lowest)
    parents = beam.numbers[:, None].expand_as(top.indices)
    return Candidates(draft.token_ids(top.indices).flatten(), scores.flatten(), parents.flatten())


def _most_probable(levels: Sequence[Candidates], num_nodes: int) -> Grown:
    """Return the tree of the candidates with the highest scores."""
    tokens, scores, parents = (torch.cat(parts) for parts in zip(*levels, strict=True))
    # Stable: a parent, which comes first, is chosen before a child of the same probability.
    order = scores.sort(descending=True, stable=True).indices[:num_nodes]
    chosen = order.sort().values
    node_of = {-1: 0} | {number: node for node, number in enumerate(chosen.tolist(), start=1)}
    found = tuple(node_of[number] for number in parents[chosen].tolist())
    return Grown(tokens[chosen].tolist(), found)
