"""Copied logits: the likeliest tokens after the last occurrence of each token, and a tree from them.

The tree has no template. Every node has a breadth, its largest number of children, and passes a
share of it on: the first child gets half (under the nodes of depth 1: all) of its parent's breadth,
each further child half of what the one before it got, and none less than 1. Nodes are expanded level
by level until the number of nodes is used up, so that the tree is wide where tokens are likely and
as deep as the number allows.

Shapes: R rows, k tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..growth.memory import check_ids, check_tensor
from .path_tree import PathTree


class CopiedRows:
    """For each token, the k likeliest tokens after it when it was last read.

    A token that was never read has k times token 0, as in the authors' code; one past V has no row.
    """

    def __init__(self, vocab_size: int, k: int) -> None:
        self._vocab_size = vocab_size
        self._k = k
        self._empty = [0] * k
        self._rows: dict[int, list[int]] = {}

    def write(self, tokens: Sequence[int], rows: Sequence[list[int]]) -> None:
        """Write the likeliest tokens [R, k or more] after each token; of equal tokens the last one wins."""
        k, vocab_size, known = self._k, self._vocab_size, self._rows
        for token, row in zip(tokens, rows, strict=True):
            if token < vocab_size:
                known[token] = row[:k]

    def grow(
        self, tree: PathTree, top: int, num_nodes: int, max_depth: int, is_chain: bool
    ) -> None:
        """Add a tree of guesses to a draft.

        Args:
            tree: the draft.
            top: the node of the draft that the guesses follow.
            num_nodes: nodes of the tree of guesses, `top` included. Nodes that the draft has already
                and repeated tokens of a row count, too.
            max_depth: depth of the deepest node allowed, counted from `top`.
            is_chain: whether only the likeliest token follows each node.
        """
        tokens, parents, depths = [tree.tokens[top]], [-1], [0]
        breadths = [1 if is_chain else self._k]
        leaves = []
        for node, token in enumerate(tokens):  # grows meanwhile
            depth = depths[node] + 1
            room = num_nodes - len(tokens)
            if room <= 0 or depth > max_depth or token >= self._vocab_size:
                leaves.append(node)
                continue
            breadth = breadths[node]
            share = breadth if depth == 2 else breadth >> 1
            row = self._rows.get(token, self._empty)[: min(breadth, room)]
            tokens += row
            parents += [node] * len(row)
            depths += [depth] * len(row)
            breadths += [max(1, share >> place) for place in range(len(row))]
        _add_paths(tree, top, tokens, parents, leaves)

    def clear(self) -> None:
        self._rows.clear()

    def describe(self) -> str:
        return f"rows of {self._k} likely tokens: {len(self._rows)} of {self._vocab_size}"

    def state(self) -> torch.Tensor:
        """Return the rows of all tokens, int32 [V, k]."""
        state = torch.zeros(self._vocab_size, self._k, dtype=torch.int32)
        if self._rows:
            state[list(self._rows)] = torch.tensor(list(self._rows.values()), dtype=torch.int32)
        return state

    def load_state(self, state: torch.Tensor) -> None:
        """Load a `state`, or raise ValueError if it does not fit."""
        shape, hint = (self._vocab_size, self._k), " (vocabulary of the model, max_breadth)"
        check_tensor("matrix: got", state, "int32", shape, hint)
        check_ids(state, self._vocab_size)
        written = state.any(dim=1).nonzero().flatten()
        self._rows = dict(zip(written.tolist(), state[written].tolist(), strict=True))


def _add_paths(
    tree: PathTree, top: int, tokens: Sequence[int], parents: Sequence[int], leaves: Sequence[int]
) -> None:
    """Add the paths to the leaves in this order: where nodes merge, order decides which comes first."""
    places = [top, *[-1] * (len(tokens) - 1)]  # in the draft
    for leaf in leaves:
        path, node = [], leaf
        while places[node] < 0:
            path.append(node)
            node = parents[node]
        for below in reversed(path):
            places[below] = tree.child(places[node], tokens[below])
            node = below
