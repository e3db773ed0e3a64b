"""How a draft network's guesses become a tree: EAGLE's fixed shape, EAGLE-2's and EAGLE-3's by probability.

Both read a level at a time from the network (`text.Draft`).

Shapes: n nodes of a level, k guesses after each, Q tokens that can be drafted, m candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ...growth.guesses import Guesses
from ...growth.tree_template import TreeTemplate
from ..tree_levels import levels_of
from .text import Draft

NAME = "mc_sim_7b_63"
# Rank paths of EAGLE's tree of this name, from its published code (SafeAILab/EAGLE,
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


@lru_cache(maxsize=64)
def fixed_shape(num_nodes: int, max_depth: int, chain_only: bool) -> TreeTemplate:
    """Return EAGLE's tree, cut to a number of nodes and a depth; or the chain of its likeliest tokens.

    The paths with the smallest sum of ranks and steps stay, the shorter ones first.
    """
    paths = [path for path in PATHS if len(path) <= max_depth]
    if chain_only:
        paths = [path for path in paths if not any(path)]
    best = sorted(paths, key=lambda path: (sum(path) + len(path), len(path), path))
    return TreeTemplate(sorted(best[:num_nodes]), NAME)


def grow_fixed(draft: Draft, shape: TreeTemplate) -> Grown:
    """Fill a fixed shape with the likeliest tokens."""
    found: list[torch.Tensor] = []
    parents = None  # of the nodes of a level, among those of the level before that have children
    for level in levels_of(shape, draft.logits.device):
        if parents is not None:
            draft.deepen(parents[level.readers], found[-1][level.readers])
        guesses = draft.logits.topk(level.num_guesses, dim=-1).indices  # [n, k]
        found.append(draft.token_ids(guesses[level.parents, level.ranks]))
        parents = level.parents
    tokens = torch.cat(found).tolist() if found else []
    return Grown(tokens, shape.topology.parents[1:])


class Candidates(NamedTuple):
    """Nodes to choose from, all [m]."""

    tokens: torch.Tensor  # their token ids
    scores: torch.Tensor  # logarithms of the probabilities of their paths
    parents: torch.Tensor  # the candidate that each follows; -1 for the root


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
    beam = Beam(torch.full((1,), -1, device=device), draft.logits.new_zeros(1))
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
    # One copy to the host.
    numbers, parents_of, guesses = torch.stack((chosen, parents[chosen], tokens[chosen])).tolist()
    node_of = {-1: 0} | {number: node for node, number in enumerate(numbers, start=1)}
    return Grown(guesses, tuple(node_of[number] for number in parents_of))


def likely_rows(draft: Draft, root: int, depth: int, width: int) -> Guesses:
    """Return what `grow_likeliest` chooses from: the `width` likeliest tokens after every node that it reads."""
    device = draft.logits.device
    tokens, parents = [torch.full((1,), root, device=device)], [torch.full((1,), -1, device=device)]
    rows, values = list[torch.Tensor](), list[torch.Tensor]()
    scores, first, num_read = draft.logits.new_zeros(1), 0, 1
    for level in range(depth):
        logits = draft.logits
        top = logits.log_softmax(dim=-1).topk(min(width, logits.shape[-1]), dim=-1)  # [n, k]
        found = top.values.nan_to_num(nan=torch.finfo(logits.dtype).min)
        rows.append(draft.token_ids(top.indices))
        values.append(found)
        if level == depth - 1:
            break
        best = (found + scores[:, None]).flatten().topk(min(width, found.numel()))
        places = best.indices // found.shape[1]  # among the nodes of the level
        drafted = rows[-1].flatten()[best.indices]
        draft.deepen(places, drafted)
        tokens.append(drafted)
        parents.append(first + places)
        scores, first = best.values, num_read
        num_read += len(places)
    # One copy to the host.
    numbers = torch.cat((torch.cat(tokens), torch.cat(parents), torch.cat(rows).flatten()))
    packed = torch.cat((numbers.double(), torch.cat(values).flatten().double())).tolist()
    k = rows[0].shape[1]
    at, of_rows = packed[: 2 * num_read], packed[2 * num_read :]
    split = num_read * k
    return Guesses(
        [int(token) for token in at[:num_read]],
        [int(parent) for parent in at[num_read:]],
        [[int(token) for token in of_rows[begin : begin + k]] for begin in range(0, split, k)],
        [of_rows[split + begin : split + begin + k] for begin in range(0, split, k)],
    )
