"""Hybrid: several sources propose candidates for every node; one calibrated probability ranks them.

There are three sources, and trained heads may be a fourth. Rows of likely next tokens are recycled
from every verified node, rejected ones included, and keyed by the last one, two and three tokens.
Among nodes verified with the same token, the one whose state was most similar also proposes its row.
The earlier place in the text that agrees with its end proposes the token that followed. And heads give
rows of their own, after the nodes of a tree that they grow first. A candidate's weight is a product over
the sources that name it (a product of experts), a little larger for a token of the text, normalised
over the node's candidates and the outcome "none of these". If no source knows a context, the most
frequent tokens are used. The tree takes the nodes with the largest probability of being accepted,
as many as pay on this device.

Sources: Token Recycling (arXiv 2408.08696) for the rows; log-linear pooling of expert opinions
(Genest and Zidek 1986); prompt lookup and suffix automata (arXiv 2411.10666) for the text's own past;
nearest-neighbour language models (arXiv 1911.00172) for rows found by the state.

Shapes: N nodes, C tokens of a prompt chunk, k tokens in a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...backends.target import TargetModel
from ...budget.best_first import Guesser, chain_of
from ...budget.measure import MAX_MEASURED_NODES
from ...budget.memory import check_names, check_size, check_topk
from ...budget.paced import CostAwareDrafter
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, Needs, VerifiedStep
from ...engine.read_out import likeliest, logit_samples_of
from ...engine.tree import DraftTree
from ...options import Options, budget_option, option, start_option
from .. import METHODS, drafter_class
from ..heads.mtp.guesser import MtpGuesser
from .asking import Asking
from .candidate_pool import CandidatePool, library_of_pool
from .tables import LONGEST_KEY

MAX_DEPTH = 24
# Methods whose heads can be one more source, and the name of the layers that the model's checkpoint ships itself.
GUIDES = ("medusa", "eagle", "eagle2", "eagle3", "peagle", "dflash")
SHIPPED = "mtp"


@dataclass(frozen=True, slots=True)
class HybridConfig(Options):
    num_nodes: int = option(
        MAX_MEASURED_NODES - 1, "drafted nodes of a step, at most", least=1, most=MAX_DRAFT
    )
    budget: str = budget_option("auto")
    output_id_topk: int = option(8, "tokens kept in a row (k)", least=1)
    start: str = start_option("the rows live")
    table_bits: int = option(
        18, "log2 of the slots of the table of rows; 18 take 10 MiB", least=8, most=24
    )
    neighbours: int = option(
        32, "verified nodes with the same token whose model states are compared; 0: none", least=0
    )
    head: str | None = option(
        None,
        f"trained heads that guess too: FOLDER has those of METHOD ({', '.join(GUIDES)}); {SHIPPED}: the "
        "MTP layers of the model's own checkpoint",
        metavar=f"METHOD=FOLDER, or {SHIPPED}",
    )
    harvest_prompt: bool | None = option(
        None,
        "also learn from the prompt's logits (default: yes; with --budget auto where the "
        "output head is a small part of the model)",
        derived=lambda given: None if given["budget"] == "auto" else True,
    )

    def _check(self) -> None:
        check_size("table_bits, output_id_topk", 2**self.table_bits, self.output_id_topk)
        library_of_pool()  # fail before any weights load if it cannot be built


class HybridDrafter(CostAwareDrafter):
    config_class = HybridConfig

    def __init__(self, config: HybridConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        check_topk(config.output_id_topk, vocab_size)
        self.needs = Needs(
            num_candidates=config.output_id_topk,
            logit_samples=config.neighbours > 0,
            prompt_logits=config.harvest_prompt,
            cold_start=config.start == "cold",
        )
        self._head = _head_of(config.head, vocab_size, device)
        self._asking = Asking()
        self._take_needs()
        self.wants_costs = config.budget == "auto"
        if config.head and self.wants_costs:
            self.num_ways = 2
            self._head.reads_late = True
        self.max_nodes = 1 + config.num_nodes
        self._pool = CandidatePool(
            2**config.table_bits, config.output_id_topk, vocab_size, config.neighbours
        )
        self._before: tuple[int, ...] = ()  # last tokens of the prompt chunks read so far
        self._hinted: Sequence[int] = ()

    def sibling(self) -> HybridDrafter:
        """Return a drafter with a text of its own; rows, states, counts and rates are shared."""
        sibling = super().sibling()
        sibling._pool = self._pool.sibling()
        sibling._head = self._head.sibling()
        return sibling

    def check_config(self, config: Any) -> None:
        super().check_config(config)
        self._head.check_config(config)
        self._take_needs()  # it may choose layers only now

    def check_target(self, target: TargetModel) -> None:
        super().check_target(target)
        self._head.check_target(target)

    def for_target(self, target: TargetModel) -> Drafter:
        self._head.for_target(target)
        self._asking.begin_text()
        self._take_needs()
        return super().for_target(target)

    def prepare(self, target: TargetModel, num_tokens: int) -> None:
        self._head.prepare_guesses(num_tokens)
        super().prepare(target, num_tokens)  # what is captured after this is late

    def _take_needs(self) -> None:
        layers = self._head.needs.hidden_layers if self._asking.wants_states else ()
        size = self._head.needs.hidden_size
        self.needs = replace(self.needs, hidden_layers=layers, hidden_size=size)

    @property
    def way(self) -> int:
        """1: with its heads left out."""
        return int(not self._asking.is_asked)

    def learn_time(self, num_tokens: int, nanoseconds: int) -> None:
        if self.num_ways > 1:
            self._asking.learn(num_tokens, nanoseconds)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._head.start(prompt_ids)
        self._pool.start(prompt_ids)
        self._before, self._hinted = (), ()

    def hint(self, tokens: Sequence[int]) -> None:
        self._hinted = tokens

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        values, top_ids = likeliest(logits, self.needs.num_candidates)
        text = (*self._before, *token_ids)
        logit_samples = logit_samples_of(logits).cpu() if self.needs.logit_samples else None
        begin = len(self._before)
        self._pool.write_rows(text, begin, top_ids.tolist(), values.tolist(), logit_samples)
        self._before = text[1 - LONGEST_KEY :]

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self._head.observe_prompt_hidden(token_ids, hidden)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        return self._pool.grow(context[-1], self.config.num_nodes, self._begun(context, budget))

    def offer(
        self, context: Sequence[int], budget: DraftBudget, most: int, least: float = 0.0
    ) -> Sequence[float]:
        limits = self._begun(context, budget)
        return self._pool.offer(context[-1], min(most, self.config.num_nodes), limits, least)

    def take(self, count: int) -> DraftTree:
        return self._pool.take(count)

    def observe(self, step: VerifiedStep) -> None:
        """Write rows for every node, the accepted path last, and index the new tokens."""
        if self.needs.hidden_layers:
            self._head.observe(step)
        if len(step.acceptance.candidates.token_ids[0]) < self.config.output_id_topk:
            self._pool.append(step.acceptance.tokens)  # a step in a rest, of which no rows are read
        else:
            self._pool.learn(step.tree, step.acceptance)

    def _begun(self, context: Sequence[int], budget: DraftBudget) -> DraftBudget:
        """Take the guesses of a hint, else of the head, for a draft within a budget; return its limits."""
        guesses = None
        if self._hinted:
            guesses = chain_of(context[-1], self._hinted)
        elif self._asking.is_asked and self.needs.hidden_layers:
            guesses = self._head.guesses(context, budget)
        if guesses:
            self._pool.guide(guesses)
        return replace(budget, max_depth=min(budget.max_depth, MAX_DEPTH))

    def skip(self, tokens: Sequence[int]) -> None:
        self._pool.append(tokens)

    def reset(self) -> None:
        self._pool.reset()

    def describe(self) -> str:
        size = self._pool.tables.num_bytes / 2**20
        text = f"rows by 1 to 3 tokens: {2**self.config.table_bits:,} slots, {size:.1f} MiB"
        if self.needs.logit_samples:
            text += f"; rows by state: {self._pool.neighbours.num_bytes / 2**20:.1f} MiB"
        counts = 4 * self.vocab_size / 2**20
        return f"{text}; counts of tokens: {counts:.1f} MiB"

    def memory(self) -> dict[str, torch.Tensor]:
        return self._pool.memory()

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_names(tensors, self.memory())
        self._pool.load_memory(tensors)


def _head_of(words: str | None, vocab_size: int, device: torch.device) -> Guesser:
    """Return the drafter of METHOD=FOLDER, the guesser of the model's own MTP layers, or one without guesses for
    None; raises ValueError.
    """
    if not words:
        return Guesser(None, vocab_size, device)
    if words == SHIPPED:
        return MtpGuesser(vocab_size, device)
    method, _, folder = words.partition("=")
    cls = drafter_class(method) if folder and method in METHODS else None
    if cls is None or not issubclass(cls, Guesser):
        raise ValueError(
            f"head: got {words}; allowed: {SHIPPED}, or METHOD=FOLDER, METHOD one of {', '.join(GUIDES)}"
        )
    return cls(cls.config_class(heads=folder), vocab_size, device)
