"""Drafters that draft where that pays on this device, and rest where it does not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..engine.budget import DraftBudget
from ..engine.drafter import Drafter, VerifiedStep
from ..engine.target import TargetModel
from ..engine.tree import DraftTree
from .cost_model import CostModel
from .measure import step_costs


class CostAwareDrafter(Drafter):
    """Base of drafters that can draft as many nodes as pay on the device."""

    # Whether `propose` reads `budget.costs`, so that the costs of a step must be known.
    wants_costs: bool = False
    # Costs of steps with this drafter on its target model, and what its steps have taught about them.
    costs: CostModel | None = None

    def for_target(self, target: TargetModel) -> Drafter:
        """Return this drafter, or where it wants costs one around it that counts what steps cost."""
        return PacedDrafter(self, target) if self.wants_costs else self

    def skip(self, tokens: Sequence[int]) -> None:
        """Take over tokens of a step that drafted nothing, since drafting did not pay."""

    def draft_costs(self) -> CostModel | None:
        """Return the costs of the model that drafts, one pass of one node for each drafted node; None if
        none does.
        """
        return None


class PacedDrafter(Drafter):
    """Another drafter on its target model: it gets the costs of a step, learned from every step, and rests
    while drafting does not pay.

    Args:
        drafter: one that wants costs.
        target: the model that its drafts are verified with.
    """

    def __init__(self, drafter: CostAwareDrafter, target: TargetModel) -> None:
        super().__init__(drafter.config, drafter.vocab_size, drafter.device)
        self._drafter, self._target = drafter, target
        self.max_nodes, self.quirks = drafter.max_nodes, drafter.quirks
        self.harvests_prompt = drafter.harvests_prompt
        if drafter.costs is None:
            drafter.costs = step_costs(target).fresh(drafter.draft_costs())
        self._costs = drafter.costs

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Let the drafter begin a sequence."""
        self._drafter.start(prompt_ids)

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Let the drafter learn from a chunk of the prompt."""
        self._drafter.observe_prompt(token_ids, logits)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return the drafter's tree at this context's costs; the root alone in a rest."""
        self._begun = time.perf_counter_ns()
        self._num_cached, self._num_compiled = len(context) - 1, self._target.num_compiled
        self._is_resting = self._costs.switch.is_resting
        self.num_candidates = 0 if self._is_resting else self._drafter.num_candidates
        self.wants_sketches = self._drafter.wants_sketches and not self._is_resting
        if self._is_resting:
            return DraftTree.chain(context[-1:], self.device)
        cost_curve = self._costs.at(self._num_cached)
        return self._drafter.propose(context, replace(budget, cost_curve=cost_curve))

    def observe(self, step: VerifiedStep) -> None:
        """Let the drafter learn, and take note of how long the step took."""
        tokens = step.acceptance.tokens
        if self._is_resting:
            self._drafter.skip(tokens)
        else:
            self._drafter.observe(step)
        taken = time.perf_counter_ns() - self._begun
        if self._target.num_compiled == self._num_compiled:
            self._costs.learn(step.tree.topology.num_nodes, len(tokens), self._num_cached, taken)
