"""ESP: the model itself guesses several tokens ahead, after masks that are appended to its input.

A mask is an embedding that is no token's: the mean of the prompt's embeddings, which follows the text slowly. After
each node of a draft, k masks take the places of the next k tokens; the logits after mask i guess the token i places
after the one that the node's own logits choose. So the masks after the last accepted node give the next tree: its
level i holds the likeliest tokens after mask i, and its nodes are the likeliest paths.

Source: Goel et al., Efficient Training-Free Multi-Token Prediction via Embedding-Space Probing, ICML 2026, arXiv
2603.17942 (k -> `num_masks`, lambda -> `rate`, block complexity -> `num_nodes` + 1).

Shapes: k masks, D size of an embedding, T tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...backends.target import TargetModel
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, Needs, VerifiedStep
from ...engine.tree import PROBE, DraftTree
from ...machine.hardware import uploaded
from ...options import Options, option

# Guesses of one place: tokens, the likeliest first, with their logarithmic probabilities.
Level = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class EspConfig(Options):
    num_nodes: int = option(
        59, "nodes of a step, drafted tokens and masks together, at most", least=3, most=MAX_DRAFT
    )
    num_masks: int = option(1, "masks after each node, which guess as many tokens", least=1, most=8)
    rate: float = option(
        0.1, "how far the mask moves towards each new token's embedding, from 0 to 1"
    )

    def _check(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"rate: got {self.rate}; allowed: 0 to 1")
        least = 2 * self.num_masks + 1
        if self.num_nodes < least:
            raise ValueError(
                f"num_nodes: got {self.num_nodes}; allowed: at least {least}, one token and the masks of "
                f"two nodes, with num_masks {self.num_masks}"
            )

    @property
    def num_tokens(self) -> int:
        """Drafted tokens of a step, at most: each node, the root included, has its masks."""
        return (1 + self.num_nodes) // (1 + self.num_masks) - 1


class EspDrafter(Drafter):
    config_class = EspConfig

    def __init__(self, config: EspConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self.max_nodes = 1 + config.num_nodes
        # One more: a guess that repeats its parent makes room.
        self.needs = Needs(num_candidates=min(1 + config.num_tokens, vocab_size), probes=True)
        self._embedding: nn.Module | None = None
        self._mask: torch.Tensor | None = None  # [D], float32
        self._levels: list[Level] = []
        self._masks_of: dict[int, range] = {}  # by node of the draft

    def for_target(self, target: TargetModel) -> Drafter:
        self._embedding = target.model.get_input_embeddings()
        return self

    @torch.inference_mode()
    def start(self, prompt_ids: Sequence[int]) -> None:
        self._levels, self._masks_of = [], {}
        self._mask = self._embedded(prompt_ids).mean(dim=0) if self._embedding else None

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return the likeliest paths and every node's masks; in a chain those of the last node alone."""
        tokens, parents = self._likeliest_paths(context[-1], budget)
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        self._masks_of = {}
        num_masks = 0 if self._mask is None else self.config.num_masks
        last = len(tokens) - 1
        for node in [last] if budget.chain_only else range(last + 1):
            begin = len(tokens)
            count = min(num_masks, budget.max_depth - depths[node])
            tokens += [PROBE] * count
            parents += [node, *range(begin, begin + count - 1)][:count]
            self._masks_of[node] = range(begin, begin + count)
        tree = DraftTree.from_lists(tokens, tuple(parents))
        return replace(tree, probe=self._mask)

    def observe(self, step: VerifiedStep) -> None:
        """Keep the guesses of the masks after the last accepted node; move the mask towards the new tokens."""
        acceptance = step.acceptance
        candidates = acceptance.candidates
        self._levels = [
            _level(candidates.token_ids[mask], candidates.logits[mask])
            for mask in self._masks_of.get(acceptance.path[-1], ())
        ]
        self._follow(acceptance.tokens)

    def skip(self, tokens: Sequence[int]) -> None:
        self._levels = []
        self._follow(tokens)

    def _likeliest_paths(self, root: int, budget: DraftBudget) -> tuple[list[int], list[int]]:
        tokens, parents, depths = [root], [-1], [0]
        levels = self._levels[: budget.max_depth]
        # Of each parent its likeliest child that is not a node yet: minus log probability, rank, parent, above it.
        queue: list[tuple[float, int, int, float]] = []

        def offer(parent: int, rank: int, above: float) -> None:
            depth = depths[parent]
            level = levels[depth] if depth < len(levels) else []
            if rank < len(level) and level[rank][0] == tokens[parent]:
                rank += 1  # a repetition
            if rank < len(level):
                heapq.heappush(queue, (above - level[rank][1], rank, parent, above))

        offer(0, 0, 0.0)
        while queue and len(tokens) <= self.config.num_tokens:
            cost, rank, parent, above = heapq.heappop(queue)
            tokens.append(levels[depths[parent]][rank][0])
            parents.append(parent)
            depths.append(depths[parent] + 1)
            if not budget.chain_only:
                offer(parent, rank + 1, above)
            offer(len(tokens) - 1, 0, cost)
        return tokens, parents

    @torch.inference_mode()
    def _follow(self, tokens: Sequence[int]) -> None:
        """Move the mask towards the embeddings of new tokens, one after the other."""
        if self._mask is not None:
            for row in self._embedded(tokens):
                self._mask = self._mask.lerp(row, self.config.rate)

    def _embedded(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the embeddings of tokens, float32 [T, D]."""
        assert self._embedding is not None
        rows: torch.Tensor = self._embedding(uploaded(token_ids, self.device))
        return rows.float()


def _level(token_ids: Sequence[int], logits: Sequence[float]) -> Level:
    """Return the guesses after a mask; their probabilities are those among the candidates that were read."""
    largest = logits[0]
    total = largest + math.log(sum(math.exp(logit - largest) for logit in logits))
    return [(token, logit - total) for token, logit in zip(token_ids, logits, strict=True)]
