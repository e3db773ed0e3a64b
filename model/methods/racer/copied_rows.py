"""Copied logits: the likeliest tokens after the last occurrence of each token, and a tree from them.

The tree has no template. Every node has a breadth, its largest number of children, and passes a share of it on:
the first child gets half of its parent's breadth (under the root: all), each further child half of what the one
before it got, and none less than 1 (paper, equation 3). Nodes are expanded level by level, in the draft itself,
until it has all the nodes that it may have: a guess that is there already costs nothing, and is expanded too. So
the tree is wide where tokens are likely and as deep as the number allows.

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
        """Add guesses to a draft.

        Args:
            tree: the draft.
            top: the node of the draft that the guesses follow.
            num_nodes: most nodes of the draft, its root included.
            max_depth: depth of the deepest node allowed, counted from `top`.
            is_chain: whether only the likeliest token follows each node.
        """
        queue = [(top, 1 if is_chain else self._k, 0)]  # node, breadth, depth
        reached = {top}  # a token may be in a row more than once: its first place counts
        for node, breadth, depth in queue:  # grows meanwhile
            token = tree.tokens[node]
            if depth == max_depth or token >= self._vocab_size:
                continue
            share = breadth if depth == 0 else breadth >> 1
            row = self._rows.get(token, self._empty)[:breadth]
            for place, guess in enumerate(row):
                child = tree.find(node, guess)
                if child is None:
                    if len(tree.tokens) >= num_nodes:
                        continue
                    child = tree.child(node, guess)
                if child not in reached:
                    reached.add(child)
                    queue.append((child, max(1, share >> place), depth + 1))

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
