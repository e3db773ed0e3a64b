"""Draft budgets: limits of a draft, and the number of drafted nodes that is worth its cost.

A tree gets the number of nodes that maximises the expected tokens per millisecond; no draft is one of the choices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # what it imports is heavy
    from .rules import SamplingRule

# Most drafted nodes of a step: each takes a row of logits and of the mask over the sequence, so that far more
# are a mistake or an attack on memory.
MAX_DRAFT = 4096
# A larger tree must promise more tokens per millisecond by this factor, since estimates err.
MARGIN = 1.01


class CostCurve(NamedTuple):
    """Milliseconds of a step by its number of nodes, at one context length."""

    sizes: tuple[int, ...]  # nodes, root included, rising from 1
    milliseconds: tuple[float, ...]  # of a step with that many nodes

    def of(self, num_nodes: int) -> float:
        """Return the milliseconds of a step with this many nodes: those of the next measured size."""
        for size, cost in zip(self.sizes, self.milliseconds, strict=True):
            if size >= num_nodes:
                return cost
        return self.milliseconds[-1] * num_nodes / self.sizes[-1]

    def best_size(self, gains: Iterable[float]) -> int:
        """Return the best number of drafted nodes; 0: no draft.

        Args:
            gains: for each drafted node the probability that it is accepted, in falling order.
                Read only as far as a larger tree could still pay.
        """
        source = iter(gains)
        tokens, num_read, is_over = 1.0, 0, False
        best_rate, best = MARGIN / self.milliseconds[0], 0
        gain = 1.0
        for index in range(1, len(self.sizes)):
            while num_read < self.sizes[index] - 1:
                gain = next(source, -1.0)
                if gain < 0.0:
                    is_over = True
                    break
                tokens += gain
                num_read += 1
            rate = tokens / self.milliseconds[index]
            if rate > best_rate:
                best_rate, best = rate * MARGIN, num_read
            if is_over or self._is_hopeless(index, tokens, gain, best_rate):
                break
        return best

    def _is_hopeless(self, index: int, tokens: float, gain: float, best_rate: float) -> bool:
        """Whether no larger tree can beat the best rate if each further node gains at most `gain`."""
        return all(
            tokens + (size - self.sizes[index]) * gain <= best_rate * cost
            for size, cost in zip(
                self.sizes[index + 1 :], self.milliseconds[index + 1 :], strict=True
            )
        )


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """Limits of a draft, inside which a drafter must stay, and how tokens are chosen.

    Attributes:
        max_depth: depth of the deepest node allowed: the context left after the root. 0 allows the root alone.
        chain_only: whether the model verifies chains only (`TargetModel.chain_only_at`).
        cost_curve: time of a step by its number of nodes; only for drafters with `wants_costs`, else None.
        sampling: how tokens are drawn, for drafters that draw theirs likewise (`DraftTree.drawn`); None: they
            are not drawn.
    """

    max_depth: int
    chain_only: bool = False
    cost_curve: CostCurve | None = None
    sampling: SamplingRule | None = None
