"""SAMD: continue from where the text's end occurred before, else draft another method's tree.

A suffix automaton over prompt and answer finds the longest suffix that occurred earlier (dynamic);
another, built beforehand, finds the longest that occurs in a corpus (static). The tokens that
followed there become a chain of guesses; a longer match gives a longer chain. After a short match
the tree of the fallback method is drafted instead; the fallback learns from every step.

Source: Y. Hu et al., SAM Decoding: Speculative Decoding via Suffix Automaton, arXiv 2411.10666
(l_threshold -> `threshold`, l_bias -> `bias`, 5 each). SAM[TR] of the paper is the fallback
`recycling`, with a corpus given as `automaton`; the paper's SAM alone, without a tree and without
bias, is the fallback `none`. The chain length by match length is from the authors' code (alpha ->
`tokens_per_match`). Using the latest occurrence is ours: it accepted more tokens with fewer nodes
than the first one.

Shapes: C prompt tokens in a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from ...budget.acceptance import ChainAcceptance
from ...budget.paced import CostAwareDrafter
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, VerifiedStep
from ...engine.tree import DraftTree
from ...options import STARTS, Options, budget_option, option
from .. import drafter_class
from .automata import Follower, Match, StaticAutomaton, SuffixAutomaton

FALLBACKS = ("recycling", "none")
# The automatic budget treats all matches from this length on as one kind.
LONGEST_KIND = 16
FALLBACK_OPTIONS = ("output_id_topk", "tree_version", "start", "policy")


@dataclass(frozen=True, slots=True)
class SamdConfig(Options):
    """Options of SAMD; the fallback's own, left at None, take its defaults."""

    fallback: str = option(
        "recycling", "what is drafted when the match is short", choices=FALLBACKS
    )
    threshold: int | None = option(
        None,
        "shortest match continued (default: 5, 1 with --fallback none)",
        least=1,
        derived=lambda given: 1 if given["fallback"] == "none" else 5,
    )
    num_pred_tokens: int = option(40, "length of the longest chain", least=1, most=MAX_DRAFT)
    tokens_per_match: int = option(4, "tokens drafted for each token of the match", least=1)
    match: str = option(
        "latest",
        "which earlier occurrence to continue; first: as in the paper",
        choices=("first", "latest"),
    )
    automaton: str | None = option(None, "a corpus's automaton, made by scripts.build_automaton")
    bias: int | None = option(
        None,
        "how many tokens longer a match in the corpus must be to count like one in the "
        "text (default: 5, 0 with --fallback none)",
        least=0,
        derived=lambda given: (
            None if given["automaton"] is None else 0 if given["fallback"] == "none" else 5
        ),
    )
    output_id_topk: int | None = option(None, "of the fallback: successors kept for each token (k)")
    tree_version: str | None = option(None, "of the fallback: tree template, JSON file, or auto")
    start: str | None = option(None, "of the fallback: hot or cold", choices=STARTS)
    policy: str | None = option(
        None,
        "of the fallback: how rows are written (default: average); original: as published",
        choices=("average", "original"),
    )
    budget: str = budget_option("fixed")

    def _check(self) -> None:
        if self.bias is not None and self.automaton is None:
            raise ValueError(f"bias: got {self.bias} without an automaton; leave it out")
        given = self._given_to_fallback()
        if self.fallback == "none" and given:
            name, value = next(iter(given.items()))
            raise ValueError(f"{name}: got {value!r} with fallback none; leave it out")
        self.fallback_config()

    def _given_to_fallback(self) -> dict[str, object]:
        options = {name: getattr(self, name) for name in FALLBACK_OPTIONS}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def fallback_class(self) -> type[Drafter]:
        """The fallback's drafter, by default with averaged rows; without one, that of the root alone."""
        return drafter_class("vanilla" if self.fallback == "none" else "recycling-averaged")

    def fallback_config(self) -> object:
        """Return the fallback's config: the given options, else those that fit the budget."""
        cls = self.fallback_class
        usual = cls.auto_options if self.budget == "auto" else {}
        return cls.config_class(**{**usual, **self._given_to_fallback()})


class SamdDrafter(CostAwareDrafter):
    config_class = SamdConfig
    auto_options = MappingProxyType({"budget": "auto"})

    def __init__(self, config: SamdConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        cls = config.fallback_class
        self._fallback = fallback = cls(config.fallback_config(), vocab_size, device)
        self._corpus = StaticAutomaton.load(config.automaton) if config.automaton else None
        if self._corpus is not None and self._corpus.largest_token >= vocab_size:
            raise ValueError(
                f"automaton: got {config.automaton} with token {self._corpus.largest_token}; allowed: "
                f"0 to {vocab_size - 1}; build it with the tokenizer of this model"
            )
        self.max_nodes = max(1 + config.num_pred_tokens, fallback.max_nodes)
        # The fallback's, but for the departures of a published code.
        self.needs = replace(fallback.needs, warmup_memory=False, overrun=0)
        self.wants_costs = config.budget == "auto" or (
            isinstance(fallback, CostAwareDrafter) and fallback.wants_costs
        )
        self._text = SuffixAutomaton()
        self._follower: Follower | None = None
        self._chain: Match | None = None
        self._rates = ChainAcceptance(LONGEST_KIND, config.num_pred_tokens)

    def sibling(self) -> SamdDrafter:
        """Return a drafter that copies from a text of its own; corpus, rates and the fallback's rows are shared."""
        sibling = super().sibling()
        sibling._fallback = self._fallback.sibling()
        return sibling

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Add the prompt to the text's automaton and follow it through that of the corpus."""
        self._text = SuffixAutomaton(prefers_latest=self.config.match == "latest")
        self._follower = Follower(self._corpus) if self._corpus is not None else None
        self._extend(prompt_ids)
        self._fallback.start(prompt_ids)

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        self._fallback.observe_prompt(token_ids, logits)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return the chain after the match if that is long enough and pays, else the fallback's tree."""
        self._chain = chain = self._long_match(budget)
        drafted = len(chain.continuation) if chain else 0
        if chain and budget.cost_curve and self.config.budget == "auto":
            drafted = self._rates.paying(chain.length - 1, drafted, budget.cost_curve)
        if chain and drafted:
            return self._drafted(chain, drafted)
        return self._of_fallback(self._fallback.propose(context, budget))

    def offer(
        self, context: Sequence[int], budget: DraftBudget, most: int, least: float = 0.0
    ) -> Sequence[float] | None:
        """Return the probabilities of the chain if the match is long enough, else of the fallback's tree."""
        self._chain = chain = self._long_match(budget)
        if chain and self.config.budget != "auto":
            return None  # chains are drafted whole
        if chain:
            return self._rates.gains(chain.length - 1, min(most, len(chain.continuation)), least)
        if self.config.fallback == "none":
            return ()
        return self._fallback.offer(context, budget, most, least)

    def take(self, count: int) -> DraftTree:
        if self._chain:
            return self._drafted(self._chain, count)
        if self.config.fallback == "none":
            return DraftTree.chain(self._text.text[-1:])
        return self._of_fallback(self._fallback.take(count))

    def observe(self, step: VerifiedStep) -> None:
        """Append the new tokens; the fallback learns from chains too."""
        tokens = step.acceptance.tokens
        if self._chain:
            self._rates.learn(self._chain.length - 1, self._chain.continuation, tokens)
        self._extend(tokens)
        self._fallback.observe(step)

    def skip(self, tokens: Sequence[int]) -> None:
        self._extend(tokens)
        self._fallback.skip(tokens)

    def reset(self) -> None:
        """Clear the fallback's memory and the learned acceptance of chains; the corpus stays."""
        self._rates.reset()
        self._fallback.reset()

    @property
    def is_hot(self) -> bool:
        return self._fallback.is_hot

    def memory(self) -> dict[str, torch.Tensor]:
        return self._fallback.memory()

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._fallback.load_memory(tensors)

    def describe(self) -> str:
        parts = [self._fallback.describe()]
        if self._corpus is not None:
            size = self._corpus.num_bytes / 2**20
            parts.append(f"automaton of {len(self._corpus.tokens)} tokens: {size:.2f} MiB")
        return "; ".join(filter(None, parts))

    def _extend(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)
        if self._follower:
            self._follower.extend(tokens)

    def _drafted(self, chain: Match, count: int) -> DraftTree:
        tree = DraftTree.chain([self._text.text[-1], *chain.continuation[:count]])
        return replace(tree, sources=(chain.source,) * (1 + count))

    def _of_fallback(self, tree: DraftTree) -> DraftTree:
        if self.config.fallback == "none":
            return tree
        return replace(tree, sources=(self.config.fallback,) * tree.topology.num_nodes)

    def _long_match(self, budget: DraftBudget) -> Match | None:
        """Return the longer match, with what is drafted; None if it is too short, or nothing followed it.

        A match in the corpus counts as shorter by the bias.
        """
        most = min(self.config.num_pred_tokens, budget.max_depth)
        best = self._text.match(most)
        if self._follower:
            found = self._follower.match(most)
            length = found.length - self.config.bias
            if found.continuation and length > best.length:
                best = found._replace(length=length)
        if best.length < self.config.threshold or not best.continuation:
            return None
        longest = self.config.tokens_per_match * best.length
        return best._replace(continuation=best.continuation[:longest])
