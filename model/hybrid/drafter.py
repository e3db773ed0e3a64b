"""Hybrid: every source bids for every node, and one calibrated probability decides.

Sources are rows of likely next tokens, recycled from every verified node (rejected ones included) and
keyed by the last one, two and three tokens, and the place in the text that agrees with its end. A
candidate's weight is a product over the sources that name it (a product of experts), a little larger
for a token of the text, normalised over the node's candidates and the outcome "none of these". Where no
source knows a context, the tokens written most often stand in. The tree takes the nodes with the largest
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

import torch

from model.best_first import CENTRES, MINUS_EDGES, AcceptanceRates, Growth, Guess
from model.draft_tree import DraftBudget, DraftTree
from model.drafter import Drafter, VerifiedStep, budget_option, check_budget
from model.hybrid.frequent_tokens import NUM_TOKENS, FrequentTokens
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
IN_TEXT_WEIGHT = math.exp(0.4)
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


# Weight of a row's entry by its code: a probability's bucket, those of the row's first token last.
_ROW_WEIGHTS = tuple(
    math.exp(ROW_OFFSET + bonus) * centre**ROW_SLOPE
    for bonus in (0.0, FIRST_BONUS)
    for centre in (1.0, *CENTRES)
)
# What a pooled probability is worth depends on who agreed on it. A kind of guess is one of these and
# a bucket of the probability.
SOURCES = ("rows", "text", "rows and text")
_KIND_CENTRES = CENTRES * len(SOURCES)
# Frequent tokens, guessed where there is no source, are one kind for each rank.
_FIRST_FREQUENT = len(_KIND_CENTRES)
_FREQUENT_PRIORS = tuple(0.05 / (1 + rank) for rank in range(NUM_TOKENS))
_KIND_SOURCES = (
    *(source for source in SOURCES for _ in CENTRES),
    *("frequent tokens" for _ in _FREQUENT_PRIORS),
)
_MATCH_WEIGHTS = tuple(math.exp(MATCH_OFFSET + MATCH_SLOPE * step) for step in MATCH_STEPS)


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
        self._rates = AcceptanceRates(_KIND_CENTRES + _FREQUENT_PRIORS)
        self._frequent = FrequentTokens(vocab_size)
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
        ends = range(begin + 1, len(text) + 1)
        for end, *row in zip(ends, top_ids.tolist(), values.tolist(), strict=True):
            self._tables.write(text[max(0, end - LONGEST_ROW_KEY) : end], *row)

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
        tokens, parents = acceptance.node_tokens, step.tree.topology.parents
        contexts = [tuple(self._index.text[-LONGEST_ROW_KEY:])]
        for node in range(1, len(tokens)):
            contexts.append((*contexts[parents[node]][1 - LONGEST_ROW_KEY :], tokens[node]))
        (token_ids, logits), k = acceptance.candidates, self.num_candidates
        # Of equal contexts the last written wins.
        for node in acceptance.accepted_last:
            self._tables.write(contexts[node], token_ids[node][:k], logits[node][:k])
        self._append(acceptance.tokens)

    def skip(self, tokens: Sequence[int]) -> None:
        """Index the new tokens."""
        self._append(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        self._index.append(tokens)
        self._frequent.append(tokens)

    def _context_at_end(self) -> _Context:
        return _Context(tuple(self._index.text[-LONGEST_KEY:]), self._index.match_end())

    def _guesses(self, context: _Context) -> list[Guess]:
        """Pool what the sources say about the token after a context."""
        weights: dict[int, float] = {}
        for row in self._tables.find(context.last[-LONGEST_ROW_KEY:]):
            for entry in row:
                token = entry // NUM_CODES
                weight = _ROW_WEIGHTS[entry % NUM_CODES]
                weights[token] = weights[token] * weight if token in weights else weight
        matching, kind_of_match = -1, 0
        if context.match:
            matching = self._index.text[context.match.position]
            step = min(context.match.length, len(_MATCH_WEIGHTS) - 1)
            kind_of_match = len(CENTRES) * (2 if matching in weights else 1)
            weights[matching] = weights.get(matching, 1.0) * _MATCH_WEIGHTS[step]
        rates = self._rates.rates
        if not weights:
            frequent = enumerate(self._frequent.top, _FIRST_FREQUENT)
            return sorted(((rates[kind], token, kind) for kind, token in frequent), reverse=True)
        for token in weights.keys() & self._index.tokens:
            weights[token] *= IN_TEXT_WEIGHT
        total = 1.0 + sum(weights.values())  # the 1 is "none of these"
        guesses = []
        for token, weight in weights.items():
            probability = weight / total
            kind = bisect_left(MINUS_EDGES, -probability)
            if token == matching:
                kind += kind_of_match
            expected = probability * rates[kind] / _KIND_CENTRES[kind]
            guesses.append((expected if expected < 1.0 else 1.0, token, kind))
        guesses.sort(reverse=True)
        return guesses

    def _follow(self, context: _Context, token: int) -> _Context:
        """Return the context after one more token."""
        last = (*context.last, token)[-LONGEST_KEY:]
        return _Context(last, self._index.follow(context.match, token, last))

    def reset(self) -> None:
        """Forget the rows, and what guesses were worth."""
        self._tables.reset()
        self._rates.reset()
        self._frequent.reset()

    def describe(self) -> str:
        """Return the size of the tables."""
        size = self._tables.num_bytes / 2**20
        return f"rows by 1 to 3 tokens: {2**self.config.table_bits:,} slots, {size:.1f} MB"

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the tables of rows, what guesses were worth, and the counts of tokens."""
        learned = {"rates": self._rates.state(), "counts": self._frequent.state()}
        return {**self._tables.memory(), **learned}

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
        self._frequent.load_state(tensors["counts"])
        self._tables.load_memory(tensors, self.vocab_size)
