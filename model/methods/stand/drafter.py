"""STAND: drafts drawn from what the model said after the same few tokens before, for temperatures above 0.

A table holds, for the last 3, 2 and 1 tokens, the 10 likeliest next tokens with their probabilities, averaged over
all times that these tokens were read. A step fills a static tree from the rows of the longest known contexts. With
sampling the children of a node are drawn from its row, none twice (Gumbel-top-k), and accepted by the ratio of
probabilities: more often than guesses, which a draw must hit. With greedy decoding they are the likeliest ones.

Source: W. Song et al., Accelerated Test-Time Scaling with Model-Free Speculative Sampling, arXiv 2506.04708; no
code of the authors was found. Departures: the paper's tree, the 80 most accepted nodes of 625, is not published;
this one has the nodes with the largest products of the rates at which children of a rank were accepted
(SmolLM2-135M on Spec-Bench questions, temperature 0.8). Rows hold probabilities at temperature 1 among the 10
tokens, and take the temperature when they are drawn from. The rows written longest ago make room.

Shapes: N nodes, R rows, k tokens of a row, n tokens of a context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from ...budget.memory import check_ids, check_names, check_tensor
from ...budget.tree_template import TreeTemplate, read_rank_paths
from ...engine.budget import DraftBudget
from ...engine.drafter import Drafter, Needs, VerifiedStep
from ...engine.rules import SamplingRule
from ...engine.tree import DraftTree, Drawn
from ...options import Options, option, start_option

TEMPLATE = Path(__file__).parent / "templates" / "80.json"
NO_TOKEN = -1


class Row(NamedTuple):
    num_read: int  # times that its context was read
    chances: dict[int, float]  # of the likeliest next tokens, the likeliest first


class NgramRows:
    """Rows by context, the one written longest ago first."""

    def __init__(self, longest: int, k: int, most: int) -> None:
        self._longest, self._k, self._most = longest, k, most
        self._rows: dict[tuple[int, ...], Row] = {}

    def write(self, text: Sequence[int], chances: Mapping[int, float]) -> None:
        """Average the probabilities of the next token into the rows of a text's last tokens."""
        for length in range(1, min(self._longest, len(text)) + 1):
            context = tuple(text[-length:])
            count, known = self._rows.pop(context, Row(0, {}))
            tokens = dict.fromkeys((*known, *chances))
            mean = {
                token: (count * known.get(token, 0.0) + chances.get(token, 0.0)) / (count + 1)
                for token in tokens
            }
            ranked = sorted(mean, key=mean.__getitem__, reverse=True)[: self._k]
            self._rows[context] = Row(count + 1, {token: mean[token] for token in ranked})
        self._make_room()

    def _make_room(self) -> None:
        while len(self._rows) > self._most:
            del self._rows[next(iter(self._rows))]

    def after(self, text: Sequence[int]) -> Mapping[int, float]:
        """Return the row of the longest known context at a text's end; empty if there is none."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if (row := self._rows.get(tuple(text[-length:]))) is not None:
                return row.chances
        return {}

    def clear(self) -> None:
        self._rows.clear()

    def state(self) -> dict[str, torch.Tensor]:
        """Return contexts and tokens [R, n + k], -1 where there are fewer, counts [R] and probabilities [R, k]."""
        num, width = len(self._rows), self._longest + self._k
        tokens = torch.full((num, width), NO_TOKEN, dtype=torch.int32)
        chances = torch.zeros(num, self._k)
        for place, (context, row) in enumerate(self._rows.items()):
            tokens[place, self._longest - len(context) : self._longest] = torch.tensor(context)
            end = self._longest + len(row.chances)
            tokens[place, self._longest : end] = torch.tensor([*row.chances])
            chances[place, : len(row.chances)] = torch.tensor([*row.chances.values()])
        counts = torch.tensor([row.num_read for row in self._rows.values()], dtype=torch.int32)
        return {"tokens": tokens, "counts": counts, "probabilities": chances}

    def load_state(self, state: Mapping[str, torch.Tensor], vocab_size: int) -> None:
        """Load a `state`, of which the newest rows that fit stay, or raise ValueError."""
        check_names(state, self.state())
        tokens, counts, chances = (state[name] for name in ("tokens", "counts", "probabilities"))
        num, width, hint = len(tokens), self._longest + self._k, " (max_context, row_tokens)"
        check_tensor("matrix: got tokens", tokens, torch.int32, (num, width), hint)
        check_tensor("matrix: got counts", counts, torch.int32, (num,))
        check_tensor("matrix: got probabilities", chances, torch.float32, (num, self._k), hint)
        check_ids(tokens + (tokens == NO_TOKEN), vocab_size)
        if not bool((counts >= 1).all() and (chances >= 0).all() and (chances <= 1).all()):
            raise ValueError("matrix: holds counts below 1, or probabilities outside 0 to 1")
        self.clear()
        for row, count, of_row in zip(
            tokens.tolist(), counts.tolist(), chances.tolist(), strict=True
        ):
            context = tuple(token for token in row[: self._longest] if token != NO_TOKEN)
            known = zip(row[self._longest :], of_row, strict=True)
            found = {token: chance for token, chance in known if token != NO_TOKEN}
            self._rows[context] = Row(count, found)
        self._make_room()


@dataclass(frozen=True, slots=True)
class StandConfig(Options):
    max_context: int = option(3, "tokens of the longest context that has a row", least=1, most=16)
    row_tokens: int = option(10, "tokens of a row (k)", least=1, most=1000)
    tree_version: str | None = option(
        None,
        "a JSON file of rank paths, whose shape counts (default: the method's own tree of 80 nodes)",
    )
    max_rows: int = option(200_000, "rows kept; the one written longest ago is replaced", least=1)
    start: str = start_option("rows live")

    def _check(self) -> None:
        self.template()

    def template(self) -> TreeTemplate:
        file = Path(self.tree_version) if self.tree_version is not None else TEMPLATE
        if not file.is_file():
            raise ValueError(
                f"tree_version: got {self.tree_version}; allowed: the path of a JSON file of rank paths"
            )
        return TreeTemplate(read_rank_paths(file, file.stem), file.stem)


class StandDrafter(Drafter):
    config_class = StandConfig
    needs = Needs(reads_rejected=False, draws=True)

    def __init__(self, config: StandConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self._k = min(config.row_tokens, vocab_size)
        self._template = config.template()
        self.max_nodes = self._template.topology.num_nodes
        self.needs = replace(self.needs, num_candidates=self._k, cold_start=config.start == "cold")
        self._rows = NgramRows(config.max_context, self._k, config.max_rows)
        self._end: list[int] = []  # the text's last tokens

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._end = list(prompt_ids[-self.config.max_context :])

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Fill the tree level by level; nodes without a known context have no children."""
        template, longest = self._template.within(budget), self.config.max_context
        endings = {0: context[-longest:]}  # by node of the template
        tokens, parents, node_of = [context[-1]], [-1], {0: 0}
        drawn: dict[int, Drawn] = {}
        for node, children in enumerate(template.topology.children):
            if not children or node not in endings:
                continue
            row = self._rows.after(endings[node])
            guesses = [*row]
            if budget.sampling is not None and row:
                row = _drawn_from(row, budget.sampling)
                drawn[node_of[node]] = Drawn([*row], [*row.values()])
                guesses = _in_turn(row, budget.sampling)
            for child, token in zip(children, guesses, strict=False):
                endings[child] = [*endings[node], token][-longest:]
                node_of[child] = len(tokens)
                tokens.append(token)
                parents.append(node_of[node])
        tree = DraftTree.from_lists(tokens, tuple(parents))
        return replace(tree, drawn=drawn) if drawn else tree

    def observe(self, step: VerifiedStep) -> None:
        """Write what the model said after each accepted node."""
        acceptance = step.acceptance
        for node, token in zip(acceptance.path, acceptance.tokens, strict=False):
            candidates = acceptance.candidates
            ids, logits = candidates.token_ids[node][: self._k], candidates.logits[node]
            weights = [math.exp(logit - logits[0]) for logit in logits[: self._k]]
            total = sum(weights)
            chances = {id_: weight / total for id_, weight in zip(ids, weights, strict=True)}
            self._rows.write(self._end, chances)
            self._follow([token])

    def skip(self, tokens: Sequence[int]) -> None:
        self._follow(tokens)

    def _follow(self, tokens: Sequence[int]) -> None:
        self._end = [*self._end, *tokens][-self.config.max_context :]

    def reset(self) -> None:
        self._rows.clear()

    def memory(self) -> dict[str, torch.Tensor]:
        return self._rows.state()

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._rows.load_state(tensors, self.vocab_size)


def _drawn_from(row: Mapping[int, float], sampling: SamplingRule) -> dict[int, float]:
    """Return the probabilities of a row's tokens at the temperature of sampling; their sum is 1."""
    largest = max(row.values())
    weights = {
        token: (chance / largest) ** (1.0 / sampling.temperature)
        for token, chance in row.items()
        if chance > 0
    }
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items() if weight > 0}


def _in_turn(row: Mapping[int, float], sampling: SamplingRule) -> list[int]:
    """Return all tokens of a row in the order in which they are drawn, none twice: by Gumbel-top-k.

    Source: W. Kool et al., Stochastic Beams and Where to Find Them, arXiv 1903.06059, section 2.3.
    """
    generator = sampling.generator
    device = torch.device("cpu") if generator is None else generator.device
    numbers = sampling.uniform(len(row), device).tolist()
    keys = {
        token: math.log(chance) - math.log(-math.log(max(number, 1e-12)))
        for (token, chance), number in zip(row.items(), numbers, strict=True)
    }
    return sorted(keys, key=keys.__getitem__, reverse=True)
