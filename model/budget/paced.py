"""Automatic budgets, of one sequence and of all sequences of a batch: they draft if that pays on this device.

In a batch the sequences' offers are merged, falling by their acceptance probability. A step of B sequences with n
drafted nodes emits B tokens and, expected, the sum of the first n probabilities; the best n is that with the most
tokens per millisecond of a pass over B + n rows. All offers fall, so each sequence takes the first nodes of its
own. Costs are corrected by every step, as for a single sequence (`model.budget.cost_model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ..backends.proofs.packing import shared_passes, why_not_packed
from ..backends.target import TargetModel
from ..engine.budget import DraftBudget
from ..engine.drafter import Drafter, VerifiedStep
from ..engine.tree import DraftTree
from ..machine.timing import seconds_of
from .cost_model import CostModel
from .measure import MAX_MEASURED_NODES, contexts_of, step_costs

if TYPE_CHECKING:  # Python 3.10 has none
    from typing import Self

SEQUENCE_COSTS = "sequence-costs"
# Sequences of the timed packed pass, and rounds of timing, of which the fastest counts.
TIMED_SEQUENCES, ROUNDS = 4, 7
# Fewest nodes that a sequence may offer, however many sequences there are, and the probability below which none is
# offered: such nodes do not pay on any device that was measured.
FEWEST_OFFERED, LEAST = 8, 0.02


class CostAwareDrafter(Drafter):
    """Base of drafters that can choose their number of nodes by the costs on this device."""

    # Whether `propose` reads `budget.cost_curve`, so that step costs must be measured.
    wants_costs: bool = False
    # Ways in which it drafts, such as with and without heads.
    num_ways: int = 1

    def __init__(self, config: Any, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self._costs: list[CostModel] = []  # of each way, once they are known; siblings share them

    @property
    def way(self) -> int:
        """The way of the next step."""
        return 0

    @property
    def costs(self) -> CostModel | None:
        """Costs of steps with this drafter and its siblings, measured and then corrected by their steps."""
        return self._costs[self.way] if self._costs else None

    @costs.setter
    def costs(self, costs: CostModel) -> None:
        self._costs[:] = [costs, *(costs.fresh() for _ in range(1, self.num_ways))]

    def learn_time(self, num_tokens: int, nanoseconds: int) -> None:
        """Learn how many tokens a whole step gave, and how long it took."""

    def for_target(self, target: TargetModel) -> Drafter:
        """Return this drafter, wrapped in a `PacedDrafter` if it wants costs."""
        return PacedDrafter(self, target) if self.wants_costs else self

    def draft_costs(self) -> CostModel | None:
        """Return the costs of the draft model, which runs one pass for each drafted node; None if there is none."""
        return None


class PacedDrafter(Drafter):
    """Wraps a drafter: gives it the costs of a step, learns them from every step, and pauses if drafting loses."""

    def __init__(self, drafter: CostAwareDrafter, target: TargetModel) -> None:
        super().__init__(drafter.config, drafter.vocab_size, drafter.device)
        self._drafter, self._target = drafter, target
        self.max_nodes, self.needs = drafter.max_nodes, drafter.needs
        self._needs_in_rest = replace(drafter.needs, num_candidates=0, logit_samples=False)
        if not drafter.costs:
            drafter.costs = step_costs(target).fresh(drafter.draft_costs())

    @property
    def _costs(self) -> CostModel:
        costs = self._drafter.costs
        assert costs
        return costs

    def sibling(self) -> Self:
        return type(self)(self._drafter.sibling(), self._target)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._drafter.start(prompt_ids)

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        self._drafter.observe_prompt(token_ids, logits)

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self._drafter.observe_prompt_hidden(token_ids, hidden)

    def hint(self, tokens: Sequence[int]) -> None:
        self._drafter.hint(tokens)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return the drafter's tree for this context's costs; the root alone in a pause."""
        self._begun = self._target.now_ns()
        self._num_cached, self._num_prepared = len(context) - 1, self._target.num_prepared
        self._is_resting = self._costs.switch.is_paused
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
        taken = self._target.now_ns() - self._begun
        if self._target.num_prepared == self._num_prepared:
            self._costs.learn(step.tree.topology.num_nodes, len(tokens), self._num_cached, taken)
            if self._costs.has_drafted:
                self._drafter.learn_time(len(tokens), taken)


class BatchBudget:
    """Divides the drafted nodes of a step among the sequences of a batch (`model.engine.batch`)."""

    def __init__(self, target: TargetModel) -> None:
        self._measured = step_costs(target)
        self._for_sequence = sequence_costs(target)
        self._costs: dict[int, CostModel] = {}  # by the number of sequences

    def is_paused(self, num_sequences: int) -> bool:
        """Whether the next step of this many sequences is of roots alone."""
        return self._of(num_sequences).switch.is_paused

    def offered(self, num_sequences: int) -> tuple[int, float]:
        """Return the most drafted nodes that a sequence may offer, and the least probability of one."""
        return max(FEWEST_OFFERED, MAX_MEASURED_NODES // num_sequences - 1), LEAST

    def share(
        self, offers: Sequence[Sequence[float]], num_sequences: int, context: float
    ) -> list[int]:
        """Return how many of its offered nodes each sequence takes.

        Offers are the acceptance probabilities of a sequence's nodes, falling. Not every sequence of the step has
        one; `context` is the number of cached tokens of a sequence, on average.
        """
        gains = sorted(chain.from_iterable(offers), reverse=True)
        curve = self._of(num_sequences).at(int(context))
        count = curve.best_size(gain / num_sequences for gain in gains)
        least = gains[count - 1] if count else float("inf")
        taken = [sum(gain > least for gain in offer) for offer in offers]
        num_left = count - sum(taken)
        for index, offer in enumerate(offers):  # of equal ones the first sequences'
            more = min(num_left, offer.count(least))
            taken[index] += more
            num_left -= more
        return taken

    def learn(
        self, num_sequences: int, num_nodes: int, num_tokens: int, context: float, nanoseconds: int
    ) -> None:
        """Learn from a step: its nodes, roots included, the tokens of all sequences, and its time."""
        num_drafted = num_nodes - num_sequences
        self._of(num_sequences).learn(
            1 + num_drafted, num_tokens / num_sequences, int(context), nanoseconds
        )

    def _of(self, num_sequences: int) -> CostModel:
        """Return the costs of steps of this many sequences."""
        if num_sequences not in self._costs:
            costs = self._measured.of_sequences(num_sequences, self._for_sequence)
            kin = (
                one
                for number, one in self._costs.items()
                if number.bit_length() == num_sequences.bit_length()
            )
            if (known := next(kin, None)) is not None:
                costs.share_learned(known)
            self._costs[num_sequences] = costs
        return self._costs[num_sequences]


def batch_budget(drafter: Drafter, target: TargetModel) -> BatchBudget | None:
    """Return the budget of a batch whose sequences draft with this method; None if their trees have fixed sizes, or
    if they cannot share passes: then each has a budget of its own.
    """
    wants_costs = isinstance(drafter, CostAwareDrafter) and drafter.wants_costs
    return BatchBudget(target) if wants_costs and not why_not_packed(target) else None


def sequence_costs(target: TargetModel) -> tuple[float, float]:
    """Return the milliseconds that a further sequence adds to a pass, its rows aside, near and far (`CONTEXTS`).

    Its keys are read, and each layer attends once more. Measured at the first call.
    """
    with target.lock:
        if SEQUENCE_COSTS not in target.measured:
            near, far = (_sequence_cost(target, context) for context in contexts_of(target))
            target.measured[SEQUENCE_COSTS] = near, far
        found: tuple[float, float] = target.measured[SEQUENCE_COSTS]
        return found


@torch.inference_mode()
def _sequence_cost(target: TargetModel, context: int) -> float:
    passes = shared_passes(target, TIMED_SEQUENCES)
    caches = [passes.new_cache(context + TIMED_SEQUENCES) for _ in range(TIMED_SEQUENCES)]
    own = target.new_cache(context + TIMED_SEQUENCES)
    roots, star = [DraftTree.chain([1])] * TIMED_SEQUENCES, DraftTree.star([1] * TIMED_SEQUENCES)

    def shared() -> None:
        passes.forward(roots, caches)

    def alone() -> None:
        target.forward(star, own)

    fastest = {shared: float("inf"), alone: float("inf")}
    for _ in range(ROUNDS):
        for run in fastest:
            for cache in (own, *caches):
                cache.set_length(context)
            fastest[run] = min(fastest[run], seconds_of(run, target.synchronize))
    return max(0.0, 1e3 * (fastest[shared] - fastest[alone]) / (TIMED_SEQUENCES - 1))
