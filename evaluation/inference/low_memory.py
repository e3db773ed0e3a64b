"""A drafter that takes little of the device's memory, for a question that did not fit with more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from model.budget.cost_model import CostModel
from model.budget.paced import CostAwareDrafter
from model.engine.budget import DraftBudget
from model.engine.drafter import Drafter, VerifiedStep
from model.engine.target import TargetModel
from model.engine.tree import DraftTree

# Tokens of the longest chain: logits and cache rows of a few nodes instead of a whole tree.
LEAN_DEPTH = 4


class LeanDrafter(CostAwareDrafter):
    """Another drafter, held to short chains, that is not shown the prompt's logits.

    Answers are the same, since drafts never change them; steps are more. The drafter's memory across
    prompts goes on, and is forgotten where it starts cold.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.config, drafter.vocab_size, drafter.device)
        self._drafter = drafter
        # Neither sketches nor the prompt's logits.
        self.needs = replace(
            drafter.needs, sketches=False, prompt_logits=False, reads_rejected=True
        )
        self._cost_aware = drafter if isinstance(drafter, CostAwareDrafter) else None
        self.wants_costs = self._cost_aware is not None and self._cost_aware.wants_costs
        self.max_nodes = min(drafter.max_nodes, 1 + LEAN_DEPTH)

    def sibling(self) -> LeanDrafter:
        return LeanDrafter(self._drafter.sibling())

    def for_target(self, target: TargetModel) -> Drafter:
        if self.needs.hidden_layers or self.needs.probes:
            self._drafter.for_target(target)
        return super().for_target(target)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._drafter.start(prompt_ids)

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self._drafter.observe_prompt_hidden(token_ids, hidden)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        depth = min(budget.max_depth, LEAN_DEPTH)
        return self._drafter.propose(context, DraftBudget(depth, True, budget.cost_curve))

    def observe(self, step: VerifiedStep) -> None:
        self._drafter.observe(step)

    def skip(self, tokens: Sequence[int]) -> None:
        self._drafter.skip(tokens)

    def reset(self) -> None:
        self._drafter.reset()

    def draft_costs(self) -> CostModel | None:
        return self._cost_aware.draft_costs() if self._cost_aware is not None else None
