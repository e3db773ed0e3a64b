"""Hybrid: every source bids for every node, and one calibrated probability decides.

Sources are rows of likely next tokens, recycled from every verified node (rejected ones included) and
keyed by the last one, two and three tokens, and the place in the text that agrees with its end. A
candidate's weight is a sum over the sources that name it (a product of experts), normalised over the
node's candidates and the outcome "none of these". The tree takes the nodes with the largest
probability of being accepted, as many as pay on this device.

Sources: Token Recycling (arXiv 2408.08696) for the rows; log-linear pooling of expert opinions
(Genest and Zidek 1986); prompt lookup and suffix automata (arXiv 2411.10666) for the text's own past.

Shapes: N nodes, C tokens of a prompt chunk, k tokens in a row, V vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from model.best_first import CENTRES, EDGES, AcceptanceRates, Growth, Guess, probability_codes
from model.draft_tree import DraftBudget, DraftTree
from model.drafter import Drafter, VerifiedStep, budget_option, check_budget
from model.hybrid.row_tables import LONGEST_KEY as LONGEST_ROW_KEY
from model.hybrid.row_tables import NUM_CODES, RowTables
from model.hybrid.suffix_index import LONGEST_KEY, Match, SuffixIndex
from model.step_costs import LARGEST
from model.top_k import top_k

STARTS = ("hot", "cold")
MAX_DEPTH = 24
# Weights of the pool, fitted on a 7M model and 120 Spec-Bench questions; flat around these values.
ROW_OFFSET, ROW_SLOPE, FIRST_BONUS = 0.85, 0.25, 0.4
MATCH_OFFSET, MATCH_SLOPE = 1.0, 0.08
# How much a match of m tokens counts, by m; longer ones count as the last.
MATCH_STEPS = (0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 7, 7, 8, 8, 8, 8, *(9,) * 8, 10)


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Options of the hybrid."""

    num_nodes: int = field(
        default=LARGEST - 1, metadata={"help": "drafted nodes of a step, at most"}
    )
    budget: str = budget_option("auto")
    output_id_topk: int = field(default=8, metadata={"help": "tokens kept in a row (k)"})
    start: str = field(
        default="hot",
        metadata={
            "help": "hot: the rows live across questions; cold: cleared before each",
            "choices": STARTS,
        },
    )
    table_bits: int = field(
        default=18, metadata={"help": "log2 of the slots of the table of rows; 18 take 10 MB"}
    )
    harvest_prompt: bool | None = field(
        default=None,
        metadata={
            "help": "make rows of the prompt's logits too (default: yes; with --budget auto where the "
            "output head is a small part of the model)"
        },
    )

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: naming the option, what was given and what is allowed.
        """
        check_budget(self.budget)
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes: got {self.num_nodes}; allowed: 1 or more")
        if self.output_id_topk < 1:
            raise ValueError(f"output_id_topk: got {self.output_id_topk}; allowed: 1 or more")
        if self.start not in STARTS:
            raise ValueError(f"start: got {self.start!r}; allowed: {', '.join(STARTS)}")
        if not 8 <= self.table_bits <= 24:
            raise ValueError(f"table_bits: got {self.table_bits}; allowed: 8 to 24")


class _Context(NamedTuple):
    """What a node's guesses depend on.

    Attributes:
        last: last tokens of its path, itself included, at most `LONGEST_KEY`.
        match: the place in the text that agrees with them.
    """

    last: tuple[int, ...]
    match: Match | None


# Weight of a row's entry by its code: a probability bucket, the row's first token marked.
FIRST = len(CENTRES) + 1
_ROW_WEIGHTS = tuple(
    ROW_OFFSET + ROW_SLOPE * math.log(centre) + bonus
    for bonus in (0.0, FIRST_BONUS)
    for centre in (1.0, *CENTRES)
)
assert len(_ROW_WEIGHTS) <= NUM_CODES
_FALLING_EDGES = (-EDGES).tolist()
# What a pooled probability is worth depends on who agreed on it. A kind of guess is one of these and
# a bucket of the probability.
SOURCES = ("rows", "text", "rows and text")
_KIND_SOURCES = tuple(source for source in SOURCES for _ in CENTRES)
_KIND_CENTRES = CENTRES * len(SOURCES)
_MATCH_WEIGHTS = tuple(MATCH_OFFSET + MATCH_SLOPE * step for step in MATCH_STEPS)


class HybridDrafter(Drafter):
    """Drafts the tree on which all sources agree best."""

    config_class = HybridConfig

    def __init__(self, config: HybridConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self.num_candidates = min(config.output_id_topk, vocab_size)
        self.is_cold = config.start == "cold"
        self.wants_prices = config.budget == "auto"
        self.harvests_prompt = config.harvest_prompt
        if config.harvest_prompt is None and not self.wants_prices:
            self.harvests_prompt = True
        self.max_nodes = 1 + config.num_nodes
        self._tables = RowTables(2**config.table_bits, self.num_candidates)
        self._rates = AcceptanceRates(_KIND_CENTRES)
        self._index = SuffixIndex()
        self._before: tuple[int, ...] = ()  # last tokens of the prompt's chunks so far

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Index the prompt."""
        self._index = SuffixIndex(prompt_ids)
        self._before = ()

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Make rows of a chunk of the prompt."""
        values, top_ids = top_k(logits, self.num_candidates)
        text = (*self._before, *token_ids)
        begin = len(self._before)
        self._before = text[1 - LONGEST_ROW_KEY :]
        contexts = [
            text[max(0, end - LONGEST_ROW_KEY) : end] for end in range(begin + 1, len(text) + 1)
        ]
        self._write(contexts, top_ids.int().cpu().numpy(), values.float().cpu().numpy())

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Grow the tree of the most probable nodes."""
        self._growth = growth = Growth(
            context[-1],
            self._context_at_end(),
            self._guesses,
            self._follow,
            min(budget.max_depth, MAX_DEPTH),
            budget.chain_only,
        )
        gains = islice(growth, self.config.num_nodes)
        num_drafted = budget.prices.worth(gains) if budget.prices else sum(1 for _ in gains)
        return growth.tree(num_drafted, self.device, _KIND_SOURCES)

    def observe(self, step: VerifiedStep) -> None:
        """Make rows of every node, the accepted path last, and index the new tokens."""
        acceptance = step.acceptance
        self._growth.teach(self._rates, acceptance)
        tokens, parents, path = acceptance.node_tokens, step.tree.topology.parents, acceptance.path
        contexts = [tuple(self._index.text[-LONGEST_ROW_KEY:])]
        for node in range(1, len(tokens)):
            contexts.append((*contexts[parents[node]][1 - LONGEST_ROW_KEY :], tokens[node]))
        order = [*range(len(tokens)), *path]  # of equal contexts the last written wins
        ids, scores = (part[:, : self.num_candidates][order] for part in acceptance.candidates)
        self._write([contexts[node] for node in order], ids, scores)
        self._index.append(acceptance.tokens)

    def _write(
        self, contexts: Sequence[tuple[int, ...]], tokens: np.ndarray, logits: np.ndarray
    ) -> None:
        """Make rows of N contexts: tokens and logits [N, k]."""
        codes = probability_codes(logits).astype(np.int32)
        codes[:, 0] += FIRST
        self._tables.write(contexts, tokens, codes)

    def _context_at_end(self) -> _Context:
        return _Context(tuple(self._index.text[-LONGEST_KEY:]), self._index.match_end())

    def _guesses(self, context: _Context) -> list[Guess]:
        """Pool what the sources say about the token after a context."""
        weights: dict[int, float] = {}
        for row in self._tables.find(context.last[-LONGEST_ROW_KEY:]):
            for entry in row:
                token = entry // NUM_CODES
                weights[token] = weights.get(token, 0.0) + _ROW_WEIGHTS[entry % NUM_CODES]
        matching, kind_of_match = -1, 0
        if context.match:
            matching = self._index.text[context.match.position]
            step = min(context.match.length, len(_MATCH_WEIGHTS) - 1)
            kind_of_match = len(CENTRES) * (2 if matching in weights else 1)
            weights[matching] = weights.get(matching, 0.0) + _MATCH_WEIGHTS[step]
        pooled = [(math.exp(weight), token) for token, weight in weights.items()]
        total = 1.0 + sum(share for share, _ in pooled)  # the 1 is "none of these"
        rates, guesses = self._rates.rates, []
        for share, token in pooled:
            probability = share / total
            kind = bisect_left(_FALLING_EDGES, -probability)
            if token == matching:
                kind += kind_of_match
            expected = probability * rates[kind] / _KIND_CENTRES[kind]
            guesses.append((min(expected, 1.0), token, kind))
        return sorted(guesses, reverse=True)

    def _follow(self, context: _Context, token: int) -> _Context:
        """Return the context after one more token."""
        last = (*context.last, token)[-LONGEST_KEY:]
        return _Context(last, self._index.follow(context.match, token, last))

    def reset(self) -> None:
        """Forget the rows, and what guesses were worth."""
        self._tables.reset()
        self._rates.reset()

    def describe(self) -> str:
        """Return the size of the tables."""
        size = self._tables.num_bytes / 2**20
        return f"rows by 1 to 3 tokens: {2**self.config.table_bits:,} slots, {size:.1f} MB"

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the tables of rows, and what guesses were worth."""
        return {**self._tables.memory(), "rates": self._rates.state()}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over saved tables.

        Raises:
            ValueError: if names, shapes or values do not fit.
        """
        if set(tensors) != set(self.memory()):
            raise ValueError(
                f"matrix: got tensors {sorted(tensors)}; allowed: {', '.join(self.memory())}"
            )
        self._rates.load_state(tensors["rates"])
        self._tables.load_memory(tensors, self.vocab_size)
