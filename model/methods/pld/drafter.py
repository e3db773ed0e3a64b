"""PLD, prompt lookup decoding: continue as the text did after an earlier copy of its last n-gram.

The last n tokens (3, then 2, then 1) are looked up in the prompt and the output so far; the tokens
after the match are proposed as a chain. Every n-gram is indexed once, so a step costs O(1) in the
length of the context. The match is the first one (as in Spec-Bench and transformers) or the latest,
which a study found to accept slightly more (+1% to +5%).

Source: A. Saxena, Prompt Lookup Decoding, 2023 (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ...budget.acceptance import ChainAcceptance
from ...budget.paced import CostAwareDrafter
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Needs, VerifiedStep
from ...engine.tree import DraftTree
from ...options import Options, budget_option, option

# A rate is kept for every length of a match and every place in the chain.
MAX_NGRAM_SIZE = 256


@dataclass(frozen=True, slots=True)
class PldConfig(Options):
    max_ngram_size: int = option(3, "longest suffix n-gram looked up", least=1, most=MAX_NGRAM_SIZE)
    num_pred_tokens: int = option(10, "length of the proposed chain", least=1, most=MAX_DRAFT)
    match: str = option(
        "first", "which earlier occurrence to continue", choices=("first", "latest")
    )
    budget: str = budget_option("fixed")


class PldDrafter(CostAwareDrafter):
    config_class = PldConfig
    needs = Needs(reads_rejected=False)
    auto_options = MappingProxyType({"budget": "auto"})

    def __init__(self, config: PldConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self.max_nodes = 1 + config.num_pred_tokens
        self.wants_costs = config.budget == "auto"
        # A chain's kind is the length of the matched n-gram.
        self._rates = ChainAcceptance(config.max_ngram_size, config.num_pred_tokens)
        self._guess: list[int] = []
        self._ngram_size = 0
        self._text: list[int] = []
        # n-gram -> where its continuation starts
        self._continuation: dict[tuple[int, ...], int] = {}

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._text = []
        self._continuation = {}
        self._append(prompt_ids)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        self._look_up(budget.max_depth)
        drafted = len(self._guess)
        if budget.cost_curve:
            drafted = self._rates.paying(self._ngram_size - 1, drafted, budget.cost_curve)
        return self.take(drafted)

    def offer(
        self, context: Sequence[int], budget: DraftBudget, most: int, least: float = 0.0
    ) -> Sequence[float]:
        self._look_up(budget.max_depth)
        return self._rates.gains(self._ngram_size - 1, min(most, len(self._guess)), least)

    def take(self, count: int) -> DraftTree:
        return DraftTree.chain([self._text[-1], *self._guess[:count]])

    def _look_up(self, max_depth: int) -> None:
        text = self._text
        self._guess = []
        for size in range(min(self.config.max_ngram_size, len(text) - 1), 0, -1):
            start = self._continuation.get(tuple(text[-size:]))
            if start is not None:
                end = start + min(self.config.num_pred_tokens, max_depth)
                self._guess, self._ngram_size = text[start:end], size
                break

    def observe(self, step: VerifiedStep) -> None:
        """Index the new tokens and learn how far the guess was right, drafted or not."""
        self._rates.learn(self._ngram_size - 1, self._guess, step.acceptance.tokens)
        self._append(step.acceptance.tokens)

    def skip(self, tokens: Sequence[int]) -> None:
        self._append(tokens)

    def reset(self) -> None:
        self._rates.reset()

    def _append(self, tokens: Sequence[int]) -> None:
        """Add tokens; an n-gram is indexed when its continuation exists, so no suffix finds itself."""
        text = self._text
        is_first = self.config.match == "first"
        for token in tokens:
            end = len(text)
            for size in range(1, min(self.config.max_ngram_size, end) + 1):
                ngram = tuple(text[end - size :])
                if is_first:
                    self._continuation.setdefault(ngram, end)
                else:
                    self._continuation[ngram] = end
            text.append(token)
