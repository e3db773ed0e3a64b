"""Successor chain: guess that every token is followed by what followed it last time in this text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from token_recycling.engine.budget import DraftBudget
from token_recycling.engine.drafter import Drafter, VerifiedStep
from token_recycling.engine.tree import DraftTree
from token_recycling.options import Options, option


@dataclass(frozen=True, slots=True)
class SuccessorChainConfig(Options):
    length: int = option(4, "guesses of a step", least=1)  # becomes --length


class SuccessorChainDrafter(Drafter):
    """Proposes a chain of last successors. It may guess wrong: verification decides every token."""

    config_class = SuccessorChainConfig

    def __init__(self, config: SuccessorChainConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self.max_nodes = 1 + config.length  # the root and the guesses
        self._next: dict[int, int] = {}  # token -> the token after it, last time
        self._last = 0

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a text: replace what belongs to the one before."""
        self._next = dict(pairwise(prompt_ids))

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return a chain from the last token of the text, inside the budget."""
        self._last = context[-1]
        chain = [self._last]
        while len(chain) <= min(self.config.length, budget.max_depth) and chain[-1] in self._next:
            chain.append(self._next[chain[-1]])
        return DraftTree.chain(chain)

    def observe(self, step: VerifiedStep) -> None:
        """Learn from the tokens that the step emitted."""
        self._next.update(pairwise([self._last, *step.acceptance.tokens]))
