"""How a draft network's guesses become a tree: EAGLE's fixed shape, EAGLE-2's and EAGLE-3's by probability.

Both read a level at a time from the network. Row p joins the feature of token p with the embedding of token p + 1
and stands at position p. The text's rows are read from the target's true hidden states, once each; a draft's rows
come after them, level by level, and are forgotten when the next rows of the text are read.

Shapes: n nodes of a level, k guesses after each, Q tokens that can be drafted, m candidates, T rows of the text, D
hidden size, W hidden states side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from ....backends.target import TargetModel
from ....budget.best_first import Guesses
from ....budget.tree_template import TreeTemplate
from ....machine.hardware import uploaded
from ..drafter import levels_of
from ..head_files import called
from ..layers import HeadRows, Projected, causal_mask
from ..replayed import ReplayedRows
from .network import DraftNetwork

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


class DraftText:
    """The rows of a text; embedding and head are the target's, the device that of its token ids."""

    def __init__(
        self, network: DraftNetwork, embedding: nn.Module, head: nn.Module, device: torch.device
    ) -> None:
        self.network, self.head, self.device = network, head, device
        self._embedding = embedding
        parameter = next(network.parameters())
        self._dtype, self._network_device = parameter.dtype, parameter.device
        self.clear()

    def clear(self) -> None:
        self._rows = HeadRows(self.network.shape, self._network_device, self._dtype)
        self._num_read = 0
        self._last: torch.Tensor | None = None  # the state after the last row [1, D]

    def sibling(self) -> DraftText:
        """Return another text, with no row yet, for the same network."""
        sibling = copy(self)
        sibling.clear()
        return sibling

    def read(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Read rows: hidden states [n, W * D], and the token after each of them."""
        self._rows.length = self._num_read
        features = self.network.fused(hidden.to(self._network_device, self._dtype))
        tokens = uploaded(token_ids, self.device)
        begin, end = self._num_read, self._num_read + len(token_ids)
        positions = torch.arange(begin, end, device=self._network_device)
        mask = causal_mask(begin, end - begin, self._network_device)
        self._last = self._run(tokens, features, positions, mask)[-1:]
        self._num_read = end

    def grown(
        self, key: tuple[object, ...], grow: Callable[[Draft], torch.Tensor]
    ) -> torch.Tensor | None:
        """Return what is grown after the last token read; None if nothing was read.

        The key tells all of `grow` that no tensor does.
        """
        draft = self.draft()
        return None if draft is None else grow(draft)

    def draft(self) -> Draft | None:
        """Begin a draft after the last token read; None if nothing was read."""
        self._rows.length = self._num_read
        return None if self._last is None else Draft(self, self._last)

    def deepen(
        self, token_ids: torch.Tensor, features: torch.Tensor, is_ancestor: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Append drafted rows of tokens [n] at a depth from 1; return their states [n, D].

        `features` [n, D] are their parents' states; `is_ancestor` [n, rows of the draft]: which rows, these
        included, each sees.
        """
        of_text = is_ancestor.new_ones(len(token_ids), self._num_read)
        position = self._num_read + depth - 1
        positions = torch.full((1,), position, device=self._network_device)
        mask = torch.cat((of_text, is_ancestor), dim=1)
        return self._run(token_ids, features, positions, mask)

    def _run(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        embeddings = called(self._embedding, token_ids).to(self._network_device, self._dtype)
        states: torch.Tensor = self.network(
            embeddings, features, positions, lambda projected: self._rows.attend(projected, mask)
        )
        return states


class ReplayedText(DraftText):
    """A text whose rows are read, and whose trees are grown, by replayed calls."""

    def __init__(
        self, network: DraftNetwork, embedding: nn.Module, head: nn.Module, target: TargetModel
    ) -> None:
        self._target, dtype = target, next(network.parameters()).dtype
        self.fixed = ReplayedRows(target, network.shape, dtype)
        with torch.inference_mode(False):
            size = network.shape.hidden_size
            self._state = torch.zeros(1, size, dtype=dtype, device=target.device)
        self._drafted: list[Projected] = []
        super().__init__(network, embedding, head, target.device)

    def clear(self) -> None:
        self.fixed.num_read = 0

    def sibling(self) -> DraftText:
        return ReplayedText(self.network, self._embedding, self.head, self._target)

    def read(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        def run(tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            embeddings = called(self._embedding, tokens).to(self._dtype)
            features = self.network.fused(rows)
            found: torch.Tensor = self.network(embeddings, features, positions, self.fixed.attend)
            return found

        self.fixed.read(token_ids, hidden, run, self._state)

    def grown(
        self, key: tuple[object, ...], grow: Callable[[Draft], torch.Tensor]
    ) -> torch.Tensor | None:
        if not self.fixed.num_read:
            return None

        def call() -> torch.Tensor:
            self._drafted = []
            return grow(Draft(self, self._state))

        found: torch.Tensor = self.fixed.replayed(key, call)
        return found

    def deepen(
        self, token_ids: torch.Tensor, features: torch.Tensor, is_ancestor: torch.Tensor, depth: int
    ) -> torch.Tensor:
        embeddings = called(self._embedding, token_ids).to(self._dtype)
        positions = (self.fixed.start + depth - 1)[None]
        states: torch.Tensor = self.network(
            embeddings,
            features,
            positions,
            lambda projected: self.fixed.attend_drafted(projected, self._drafted, is_ancestor),
        )
        return states


class Draft:
    def __init__(self, text: DraftText, last: torch.Tensor) -> None:
        self._text = text
        self._states = last
        self._depth = 0
        self._is_ancestor = torch.zeros(1, 0, dtype=torch.bool, device=last.device)
        # Of the tokens after each node of the last level that was read, [n, Q]; first after the text, [1, Q].
        self.logits = text.network.logits(last, text.head)

    def deepen(self, parents: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Read a level of nodes: the place of each parent in the level before, and the tokens, both [n]."""
        count = len(parents)
        itself = torch.eye(count, dtype=torch.bool, device=self._is_ancestor.device)
        self._is_ancestor = torch.cat((self._is_ancestor[parents], itself), dim=1)
        self._depth += 1
        features = self._states[parents]
        self._states = self._text.deepen(token_ids, features, self._is_ancestor, self._depth)
        self.logits = self._text.network.logits(self._states, self._text.head)

    def token_ids(self, places: torch.Tensor) -> torch.Tensor:
        """Return the token ids of places among the logits."""
        return self._text.network.token_ids(places)


class Grown(NamedTuple):
    """A tree without its root: tokens and parents of its nodes, 0 for the root, n for the n-th node."""

    tokens: list[int]
    parents: tuple[int, ...]


@lru_cache(maxsize=64)
def fixed_shape(num_nodes: int, max_depth: int, chain_only: bool) -> TreeTemplate:
    """Return EAGLE's tree, or the chain of its likeliest tokens, cut to a number of nodes and a depth.

    The paths with the smallest sum of ranks and steps stay, the shorter ones first.
    """
    paths = [path for path in PATHS if len(path) <= max_depth]
    if chain_only:
        paths = [path for path in paths if not any(path)]
    best = sorted(paths, key=lambda path: (sum(path) + len(path), len(path), path))
    return TreeTemplate(sorted(best[:num_nodes]), NAME)


def grow_fixed(text: DraftText, shape: TreeTemplate) -> Grown | None:
    """Fill a fixed shape with the likeliest tokens; None if nothing was read."""
    found = text.grown(("fixed", shape), partial(_filled, shape=shape))
    return None if found is None else Grown(found.tolist(), shape.topology.parents[1:])


def _filled(draft: Draft, shape: TreeTemplate) -> torch.Tensor:
    found: list[torch.Tensor] = []
    parents = None  # of the nodes of a level, among those of the level before that have children
    for level in levels_of(shape, draft.logits.device):
        if parents is not None:
            draft.deepen(parents[level.readers], found[-1][level.readers])
        guesses = draft.logits.topk(level.num_guesses, dim=-1).indices  # [n, k]
        found.append(draft.token_ids(guesses[level.parents, level.ranks]))
        parents = level.parents
    return torch.cat(found) if found else draft.logits.new_empty(0, dtype=torch.long)


class TreeLevel(NamedTuple):
    """The likeliest tokens after each of the n nodes of a level that are read, all but `read` [n, k]."""

    tokens: torch.Tensor  # their token ids
    values: torch.Tensor  # logarithms of their probabilities
    scores: torch.Tensor  # logarithms of the probabilities of their paths
    # Of each node its place among the tokens of the level before [n]; empty for the root.
    read: torch.Tensor


def _levels(draft: Draft, depth: int, width: int) -> list[TreeLevel]:
    """Read the `width` most probable nodes of each level; return the `width` likeliest tokens after each."""
    lowest = torch.finfo(draft.logits.dtype).min
    scores = draft.logits.new_zeros(1)
    read = torch.empty(0, dtype=torch.long, device=draft.logits.device)
    levels: list[TreeLevel] = []
    for _ in range(depth):
        if levels:
            above = levels[-1]
            best = above.scores.flatten().topk(min(width, above.scores.numel()))
            read, scores = best.indices, best.values
            draft.deepen(read // above.scores.shape[1], above.tokens.flatten()[read])
        logits = draft.logits
        top = logits.log_softmax(dim=-1).topk(min(width, logits.shape[-1]), dim=-1)
        # Logits that are no numbers make no order.
        totals = (top.values + scores[:, None]).nan_to_num(nan=lowest, neginf=lowest)
        levels.append(TreeLevel(draft.token_ids(top.indices), top.values, totals, read))
    return levels


def grow_likeliest(text: DraftText, num_nodes: int, depth: int, width: int) -> Grown | None:
    """Return the tree of the most probable nodes: `num_nodes` of all tokens after the nodes that are read.

    None if nothing was read.
    """
    sizes = (num_nodes, depth, width)
    grow = partial(_likeliest, num_nodes=num_nodes, depth=depth, width=width)
    found = text.grown(("likeliest", *sizes), grow)
    if found is None:
        return None
    # One copy to the host.
    numbers_of, parents_of, guesses = found.tolist()
    node_of = {-1: 0} | {number: node for node, number in enumerate(numbers_of, start=1)}
    return Grown(guesses, tuple(node_of[number] for number in parents_of))


def _likeliest(draft: Draft, num_nodes: int, depth: int, width: int) -> torch.Tensor:
    """Return the numbers, parents and tokens of the chosen nodes, [3, nodes]."""
    levels = _levels(draft, depth, width)
    parents, num_before = [levels[0].tokens.new_full((levels[0].tokens.numel(),), -1)], 0
    for above, level in pairwise(levels):
        numbers = num_before + level.read  # among all tokens
        parents.append(numbers.repeat_interleave(level.tokens.shape[1]))
        num_before += above.tokens.numel()
    scores = torch.cat([level.scores.flatten() for level in levels])
    # Stable: a parent, which comes first, is chosen before a child of the same probability.
    order = scores.sort(descending=True, stable=True).indices[:num_nodes]
    chosen = order.sort().values
    tokens = torch.cat([level.tokens.flatten() for level in levels])
    return torch.stack((chosen, torch.cat(parents)[chosen], tokens[chosen]))


def likely_rows(text: DraftText, root: int, depth: int, width: int) -> Guesses | None:
    """Return what `grow_likeliest` chooses from: the `width` likeliest tokens after every node that it reads."""
    found = text.grown(("rows", depth, width), partial(_rows, depth=depth, width=width))
    if found is None:
        return None
    # One copy to the host.
    rows = found.tolist()
    k = (len(rows[0]) - 2) // 2
    return Guesses(
        [root, *(int(row[0]) for row in rows[1:])],
        [int(row[1]) for row in rows],
        [[int(token) for token in row[2 : 2 + k]] for row in rows],
        [row[2 + k :] for row in rows],
    )


def _rows(draft: Draft, depth: int, width: int) -> torch.Tensor:
    """Return token (the root's is -1), parent, likely tokens and values of each node, [nodes, 2 + 2 k]."""
    levels = _levels(draft, depth, width)
    k = levels[0].tokens.shape[1]
    tokens, parents = ([levels[0].tokens.new_full((1,), -1)] for _ in range(2))
    first = 0  # of the level before, among the nodes
    for above, level in pairwise(levels):
        tokens.append(above.tokens.flatten()[level.read])
        parents.append(first + level.read // k)
        first += len(above.tokens)
    nodes = torch.stack((torch.cat(tokens), torch.cat(parents)), dim=1)  # [nodes, 2]
    rows = torch.cat([level.tokens for level in levels])  # [nodes, k]
    values = torch.cat([level.values for level in levels])
    values = values.nan_to_num(nan=torch.finfo(values.dtype).min)
    return torch.cat((nodes.double(), rows.double(), values.double()), dim=1)
