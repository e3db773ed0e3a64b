"""SSSD: what followed the text's end in the text itself and in a datastore, as one tree by estimated probability.

Runs of 8 tokens of prompt and answer are counted. Where the last 4, 3, 2 or 1 tokens begin such runs, what
follows there is proposed with its share of the counts, times 0.6, and times 0.6 + 0.1 m for each further token
(m tokens of the text agree). A datastore proposes what followed at up to 100 places, evenly spread, of the last 4
tokens; of fewer tokens too, while it has found less than 50. The most probable nodes of both are the draft.

Source: M. Marzollo et al., SSSD: Simply-Scalable Speculative Decoding, arXiv 2411.05894, and its code,
github.com/huawei-csl/sssd_speculator at cafa179 (prompt_branch_length -> `run_length`, prompt_prefix_length ->
`max_match`, branch_length -> `draft_length`, maxTopk -> `max_children`). Defaults are those for one text in
github.com/huawei-csl/sglang-sssd. Departures: with `--budget auto` the number of nodes comes from measured passes
in place of a roofline, and answers do not enter the datastore while it is used.

Shapes: N nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, takewhile
from types import MappingProxyType

import numpy as np
import torch

from ...budget.paced import CostAwareDrafter
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Needs, VerifiedStep
from ...engine.tree import DraftTree
from ...options import Options, budget_option, option
from .datastore import BOUNDARY, Datastore, loaded_for

# Numbers of the authors' code: how far the text's own runs are trusted, at first and after a match of m tokens;
# places of the datastore that are enough, and those that are read; tokens of a prompt's end that count as answer.
TRUST, LEAST_TRUST, TRUST_OF_TOKEN = 0.6, 0.6, 0.1
ENOUGH, MOST_PLACES = 50, 100
FROM_PROMPT = 3


class Run:
    """How often a run of tokens was added, and what it went on with."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Run] = {}

    def add(self, tokens: Iterable[int]) -> None:
        run = self
        run.count += 1
        for token in tokens:
            if (after := run.children.get(token)) is None:
                after = run.children[token] = Run()
            after.count += 1
            run = after

    def find(self, tokens: Iterable[int]) -> Run | None:
        run: Run | None = self
        for token in tokens:
            if run is None:
                break
            run = run.children.get(token)
        return run


@dataclass(frozen=True, slots=True)
class SssdConfig(Options):
    datastore: str | None = option(
        None, "file of scripts.build_datastore (default: the text alone drafts)"
    )
    num_nodes: int = option(31, "drafted nodes of a step, at most", least=1, most=MAX_DRAFT)
    max_match: int = option(4, "longest end of the text that is looked up", least=1, most=64)
    run_length: int = option(8, "tokens of the text's runs, match included", least=2, most=64)
    draft_length: int = option(6, "tokens that a datastore drafts in a row", least=1, most=64)
    max_children: int = option(5, "children of a node, at most", least=1)
    budget: str = budget_option("fixed")


class SssdDrafter(CostAwareDrafter):
    """Drafts what followed in the text and, if one is given, in a datastore.

    Raises:
        ValueError: if the datastore cannot be read or is of another tokenizer.
    """

    config_class = SssdConfig
    needs = Needs(reads_rejected=False)
    auto_options = MappingProxyType({"budget": "auto"})

    def __init__(self, config: SssdConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self._datastore = loaded_for(config.datastore, vocab_size) if config.datastore else None
        self.max_nodes = 1 + config.num_nodes
        self.wants_costs = config.budget == "auto"
        self.start([])

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Count the prompt's runs; its last tokens count as the first of the answer."""
        length = self.config.run_length
        self._runs = Run()
        for begin in range(len(prompt_ids) - FROM_PROMPT):
            self._runs.add(prompt_ids[begin : begin + length])
        self._answer = list(prompt_ids[-FROM_PROMPT:])
        self._grown: tuple[list[int], list[int], list[float]] = [], [], []

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        gains = self.offer(context, budget, self.config.num_nodes)
        curve = budget.cost_curve
        return self.take(len(gains) if curve is None else curve.best_size(gains))

    def offer(
        self, context: Sequence[int], budget: DraftBudget, most: int, least: float = 0.0
    ) -> Sequence[float]:
        """Grow the tree of the most probable nodes of both sources; of equals the deeper one first."""
        tokens, parents, gains = [context[-1]], [-1], list[float]()
        children: list[dict[int, int]] = [{}]
        max_children = 1 if budget.chain_only else self.config.max_children
        queue: list[tuple[float, int, int, int, Run, int, float]] = []
        numbers = count()

        def add(run: Run, chance: float, share: float, trust: float, node: int, depth: int) -> None:
            for token, after in run.children.items() if depth <= budget.max_depth else ():
                # In the order in which the authors' code multiplies: rounding decides some ties.
                found = after.count / run.count * chance * share
                heappush(queue, (-found, -depth, next(numbers), token, after, node, trust))

        ending = context[-self.config.max_match :]
        for size in range(len(ending), 0, -1):
            if run := self._runs.find(ending[-size:]):
                add(run, TRUST, 1.0, min(1.0, LEAST_TRUST + TRUST_OF_TOKEN * size), 0, 1)
        if self._datastore is not None:
            add(_stored(self._datastore, ending, self.config.draft_length), 1.0, 1.0, 1.0, 0, 1)
        while queue and len(gains) < min(most, self.config.num_nodes) and -queue[0][0] >= least:
            minus, minus_depth, _, token, run, parent, trust = heappop(queue)
            node = children[parent].get(token)
            if node is None:
                if len(children[parent]) >= max_children:
                    continue
                node = children[parent][token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                children.append({})
                gains.append(min(1.0, -minus))
            add(run, -minus, trust, trust, node, 1 - minus_depth)
        self._grown = tokens, parents, gains
        return gains

    def take(self, count: int) -> DraftTree:
        tokens, parents, _ = self._grown
        return DraftTree.from_lists(tokens[: 1 + count], tuple(parents[: 1 + count]))

    def observe(self, step: VerifiedStep) -> None:
        self.skip(step.acceptance.tokens)

    def skip(self, tokens: Sequence[int]) -> None:
        """Count the runs that are whole now."""
        length, answer = self.config.run_length, self._answer
        answer += tokens
        while len(answer) >= length:
            self._runs.add(answer[:length])
            del answer[0]

    def describe(self) -> str:
        return "" if self._datastore is None else self._datastore.describe()


def _stored(datastore: Datastore, ending: Sequence[int], length: int) -> Run:
    """Return the runs after an ending in a datastore; after shorter ones too, while there are not enough."""
    runs = Run()
    for size in range(len(ending), 0, -1):
        found = datastore.find(ending[-size:], len(datastore.suffixes))
        if found:
            step = max(1.0, (len(found) - 1) / MOST_PLACES)
            spread = np.arange(found.start, found.stop - 1 + step / 2, step)
            places = np.unique(np.floor(spread + 0.5).astype(np.int64))
            for row in datastore.following(places, size, length).tolist():
                runs.add(takewhile(lambda token: token != BOUNDARY, row))
        if runs.count >= ENOUGH:
            break
    return runs
