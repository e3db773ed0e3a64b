"""Goose: a long chain where the text repeats itself, with branches of recycled successors along it.

The continuation of the text's end, where it occurred before, is the spine of a tree: one deep chain.
Branches hang from the root and from every spine node: the successors that the model found likeliest
after the last two tokens (or one) there. The more the chain is trusted, the more nodes there are, and
the more of them go to the chain. Without a match the tree is all branches; where the root was never
seen before, the chain is drafted alone.

Algorithm 1 of the paper: the spine takes its share of the nodes; the rest goes by halves to the root and to the
spine nodes, of these most to the first ones; what is left grows the branches level by level.

Source: T. Jin et al., Goose: Anisotropic Speculation Trees for Training-Free Speculative Decoding,
COLM 2026, arXiv 2604.02047; github.com/2kinto/GOOSE_Speculative_Decoding (B, `node_budget`, which
counts the root -> 1 + `num_nodes`; K, `adjacency_top_k` -> `output_id_topk`; rho -> `SPINE_BRANCHES`).

Shapes: C prompt tokens in a chunk, k successors in a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...budget.memory import MAX_BYTES, check_topk
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, Needs, VerifiedStep
from ...engine.read_out import likeliest
from ...engine.tree import DraftTree
from ...options import STARTS, Options, option
from .sources import NONE, EarlierText, SuccessorTable

# Successors with a smaller share are not drafted.
LEAST_SHARE = 0.01
# Part of the branches that hangs from the spine (rho); the rest hangs from the root.
SPINE_BRANCHES = 0.5
# Share of the nodes that the spine may take, by the share of its nodes that was accepted lately: below each.
SPINE_SHARES = ((0.2, 0.15), (0.4, 0.30), (float("inf"), 0.50))
FIRST_RATE = 0.5
# Weight of the last step in the share of the spine that was accepted lately (alpha).
SMOOTHING = 0.3


class Limits(NamedTuple):
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
        # Leaves, with the share they were drafted at.
        self._growing: deque[tuple[int, float]] = deque()

    @property
    def sources(self) -> tuple[str, ...]:
        """Source of each node: the text's own past or the table."""
        num_others = len(self.tokens) - 1 - self.num_spine
        return ("text",) * (1 + self.num_spine) + ("rows",) * num_others

    def grow(self, chain: Sequence[int]) -> None:
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


@dataclass(frozen=True, slots=True)
class GooseConfig(Options):
    num_nodes: int = option(
        59, "drafted nodes of a step without confidence in the chain", least=1, most=MAX_DRAFT
    )
    max_extended_chain: int = option(
        100,
        "longest chain of a confident step, which may draft up to this many nodes where --num-nodes "
        "is less",
        least=1,
        most=MAX_DRAFT,
    )
    max_chain: int = option(20, "tokens copied from one match", least=1, most=MAX_DRAFT)
    max_branch_depth: int = option(6, "depth at which branches stop growing", least=1)
    output_id_topk: int = option(10, "successors kept in a row (k)", least=1)
    start: str = option(
        "cold", "cold: rows are cleared before each question; hot: they live on", choices=STARTS
    )


class GooseDrafter(Drafter):
    config_class = GooseConfig

    def __init__(self, config: GooseConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        check_topk(config.output_id_topk, vocab_size)
        self.needs = Needs(
            num_candidates=config.output_id_topk,
            prompt_logits=True,
            cold_start=config.start == "cold",
        )
        self._most = max(config.num_nodes, config.max_extended_chain)
        self.max_nodes = 1 + self._most
        self._table = SuccessorTable(config.output_id_topk)
        self._text = self._new_text()
        self._before_chunk = NONE
        self._rate = FIRST_RATE
        self._num_spine = 0
        self._is_tree = False

    def sibling(self) -> GooseDrafter:
        """Return a drafter that copies from a text of its own; the rows of all texts are shared."""
        sibling = super().sibling()
        sibling._text = self._new_text()
        return sibling

    def _new_text(self) -> EarlierText:
        return EarlierText(self.config.max_chain, self.config.max_extended_chain)

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Index the prompt; rows that have grown too many are forgotten."""
        if self._table.num_bytes > MAX_BYTES:
            self._table.clear()
        self._text.clear()
        self._text.extend(prompt_ids)
        self._before_chunk = NONE
        self._rate = FIRST_RATE

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        values, top_ids = likeliest(logits, self.needs.num_candidates)  # [C, k]
        before = [self._before_chunk, *token_ids[:-1]]
        self._table.write(before, token_ids, top_ids.tolist(), values.tolist())
        self._before_chunk = token_ids[-1]

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return a tree around the chain; the chain alone after a root that the table does not know."""
        root, before = context[-1], context[-2] if len(context) > 1 else NONE
        chain, confidence = self._text.chain()
        self._is_tree, self._num_spine = self._table.knows(before, root), 0
        if not self._is_tree:
            tokens = chain[: min(self.config.num_nodes, budget.max_depth)]
            return DraftTree.chain([root, *tokens])
        chain = self._text.extended(chain, confidence)
        limits = self._limits(confidence, budget.max_depth)
        if budget.chain_only:
            chain = chain or self._table.likeliest_path(before, root, limits.branch_depth)
            num_nodes = 1 + min(len(chain), self.config.num_nodes, budget.max_depth)
            limits = limits._replace(num_nodes=num_nodes, num_spine=num_nodes - 1)
        tree = SpineTree(self._table, before, root, limits)
        tree.grow(chain)
        self._is_tree, self._num_spine = len(tree.tokens) > 1, tree.num_spine
        return DraftTree.from_lists(tree.tokens, tuple(tree.parents), tree.sources)

    def observe(self, step: VerifiedStep) -> None:
        """Write rows for every node in the tree's order, rate the spine, and index the new tokens."""
        acceptance, text = step.acceptance, self._text.tokens
        tokens = acceptance.node_tokens
        before = [tokens[parent] for parent in step.tree.topology.parents]
        # As in the authors' code: the root's pair is written after chains and plain steps only.
        before[0] = NONE if self._is_tree or len(text) < 2 else text[-2]
        self._table.write(before, tokens, *acceptance.candidates)
        if self._num_spine:
            num_accepted = sum(0 < node <= self._num_spine for node in acceptance.path)
            self._rate += SMOOTHING * (num_accepted / self._num_spine - self._rate)
        self._text.extend(acceptance.tokens)

    def skip(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)

    def reset(self) -> None:
        self._table.clear()

    def memory(self) -> dict[str, torch.Tensor]:
        return self._table.memory()

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._table.load_memory(tensors, self.vocab_size)

    def describe(self) -> str:
        size = self._table.num_bytes / 2**20
        return (
            f"rows by 1 and 2 tokens: {self._table.num_rows:,}, {size:.2f} MiB without their keys"
        )

    def _limits(self, confidence: float, max_depth: int) -> Limits:
        """Return the limits of a tree: confidence adds nodes, and gives the spine a larger share of them."""
        config = self.config
        num_nodes = 1 + config.num_nodes
        num_nodes += int(confidence * max(0, config.max_extended_chain - num_nodes))
        share = next(share for rate, share in SPINE_SHARES if self._rate < rate)
        num_spine = int(num_nodes * (share + confidence * (1.0 - share)))
        return Limits(
            num_nodes,
            min(num_spine, self._most),
            config.max_branch_depth,
            max_depth,
            config.output_id_topk,
        )
