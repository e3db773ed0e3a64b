"""Drafters with an automatic budget: they draft if that pays on this device, else they rest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..backends.target import TargetModel
from ..engine.budget import DraftBudget
from ..engine.drafter import Drafter, VerifiedStep
from ..engine.tree import DraftTree
from .cost_model import CostModel
from .measure import step_costs

if TYPE_CHECKING:  # Python 3.10 has none
    from typing import Self


class CostAwareDrafter(Drafter):
    """Base of drafters that can choose their number of nodes by the costs on this device."""

    # Whether `propose` reads `budget.cost_curve`, so that step costs must be measured.
    wants_costs: bool = False

    def __init__(self, config: Any, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self._costs: list[CostModel] = []  # one, once it is known; siblings share it

    @property
    def costs(self) -> CostModel | None:
        """Costs of steps with this drafter and its siblings, measured and then corrected by their steps."""
        return self._costs[0] if self._costs else None

    @costs.setter
    def costs(self, costs: CostModel) -> None:
        self._costs[:] = [costs]

    def for_target(self, target: TargetModel) -> Drafter:
        """Return this drafter, wrapped in a `PacedDrafter` if it wants costs."""
        return PacedDrafter(self, target) if self.wants_costs else self

    def draft_costs(self) -> CostModel | None:
        """Return the costs of the draft model, which runs one pass for each drafted node; None if there is none."""
        return None


class PacedDrafter(Drafter):
    """Wraps a drafter: gives it the costs of a step, learns them from every step, and rests if drafting loses."""

    def __init__(self, drafter: CostAwareDrafter, target: TargetModel) -> None:
        super().__init__(drafter.config, drafter.vocab_size, drafter.device)
        self._drafter, self._target = drafter, target
        self.max_nodes, self.needs = drafter.max_nodes, drafter.needs
        self._needs_in_rest = replace(drafter.needs, num_candidates=0, logit_samples=False)
        self._costs = drafter.costs or step_costs(target).fresh(drafter.draft_costs())
        drafter.costs = self._costs

    def sibling(self) -> Self:
        return type(self)(self._drafter.sibling(), self._target)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._drafter.start(prompt_ids)

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        self._drafter.observe_prompt(token_ids, logits)

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self._drafter.observe_prompt_hidden(token_ids, hidden)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return the drafter's tree for this context's costs; the root alone in a rest."""
        self._begun = time.perf_counter_ns()
        self._num_cached, self._num_prepared = len(context) - 1, self._target.num_prepared
        self._is_resting = self._costs.switch.is_resting
        self.needs = self._needs_in_rest if self._is_resting else self._drafter.needs
        if self._is_resting:
            return DraftTree.chain(context[-1:])
        cost_curve = self._costs.at(self._num_cached)
        return self._drafter.propose(context, replace(budget, cost_curve=cost_curve))

    def observe(self, step: VerifiedStep) -> None:
        """Let the drafter learn, and correct the costs by the time of the step."""
        tokens = step.acceptance.tokens
        if self._is_resting and not self.needs.hidden_layers:
            self._drafter.skip(tokens)
        else:
            self._drafter.observe(step)
        taken = time.perf_counter_ns() - self._begun
        if self._target.num_prepared == self._num_prepared:
            self._costs.learn(step.tree.topology.num_nodes, len(tokens), self._num_cached, taken)
