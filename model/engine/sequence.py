"""A sequence under way: what was asked for, its tokens, its cache and its drafter.

A step is `propose` (or `offer` and `take`, or `pause`), a pass, `conclude`; another order is refused. The loop
of one sequence (`model.engine.loop`) and that of several (`model.engine.batch`) are both built on it. The prompt is
read up to its last token, which is the first tree's root, so that acceptance lengths sum exactly to the number of
new tokens.

Shapes: N nodes, V vocabulary, C prompt tokens in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from ..options import integer
from .backend import Backend, Hidden
from .budget import MAX_DRAFT, DraftBudget
from .drafter import Drafter, Needs, VerifiedStep
from .read_out import Reader
from .rules import SamplingRule, TokenRule, as_in_transformers
from .step import StepRecord, StepTimer
from .tree import DraftTree
from .verification import Acceptance, ReferenceRows, verify


class Request(NamedTuple):
    """A sequence that is asked for, on its way from a caller to its last step. Limits are in tokens."""

    prompt_ids: Sequence[int]  # at least one
    max_new_tokens: int  # exact for every method
    eos_ids: Collection[int] = ()  # that end the sequence; the one that ends it is emitted
    rule: TokenRule | None = None  # None for greedy decoding, else how each token is chosen
    # Asked after every new token, with the sequence so far, whether it ends the sequence.
    stop: Callable[[Sequence[int]], bool] | None = None
    # Asked after every step why the sequence ends with it, whatever its tokens; None lets it go on.
    interrupt: Callable[[], str | None] | None = None
    # Asked before a draft, with the sequence so far, which tokens probably follow.
    guesses: Callable[[Sequence[int]], Sequence[int]] | None = None
    # Prompt and answer together. This and what follows is found by `checked`.
    context: int = 0
    num_visible: int = 0  # new tokens that are emitted
    # New tokens until the loop ends; more where a published code that runs past the limit is reproduced.
    num_total: int = 0
    name: str = ""  # the limit that comes first, "length" or "context"

    def checked(self, target: Backend, overrun: int = 0) -> Request:
        """Return the request with its limits. Greedy decoding goes `overrun` tokens past the limit, unseen.

        Raises:
            ValueError: if the prompt is empty, holds a token that the model does not have or leaves no
                room in the context, or if max_new_tokens < 1; and as `Backend.check_model`.
        """
        target.check_model()
        limit = integer("max_new_tokens", self.max_new_tokens, least=1)
        length, num_tokens = len(self.prompt_ids), target.num_tokens
        if not length:
            raise ValueError("prompt: got no token; allowed: at least one")
        if outside := [token for token in self.prompt_ids if not 0 <= token < num_tokens]:
            raise ValueError(f"prompt: got token {outside[0]}; allowed: 0 to {num_tokens - 1}")
        context = target.context_limit()
        if context is None:
            context = length + limit + MAX_DRAFT
        room = context - length
        if room < 1:
            raise ValueError(
                f"prompt: got {length} tokens; allowed: fewer than the model's context of "
                f"{context}; shorten the prompt"
            )
        num_visible = min(limit, room)
        if not self.is_greedy:
            # Unseen steps would draw from the generator of the next answer, and ask the user's
            # criteria about tokens that are never emitted.
            overrun = 0
        return self._replace(
            context=context,
            num_visible=num_visible,
            num_total=min(num_visible + overrun, room),
            name="length" if num_visible == limit else "context",
        )

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are the argmax and no stopping criterion is asked."""
        return self.rule is None and self.stop is None

    def stop_reason(self, acceptance: Acceptance, num_emitted: int) -> str | None:
        """Return why the loop ends after `num_emitted` tokens, None if it goes on.

        The limit is checked before an end-of-sequence bonus token, as in the published loop.
        """
        if num_emitted >= self.num_total:
            return "criteria" if acceptance.is_stopped else self.name
        reason = self._end_of(acceptance.tokens, acceptance.is_stopped)
        return reason or (self.interrupt() if self.interrupt is not None else None)

    def visible(self, record: StepRecord, num_emitted: int) -> StepRecord | None:
        """Return a step, up to which `num_emitted` tokens exist, cut at the limit; None if nothing is left."""
        num_hidden = max(0, num_emitted - self.num_visible)
        tokens = record.tokens[: max(0, len(record.tokens) - num_hidden)]
        if not tokens:
            return None
        reason = self._end_of(tokens, record.stop_reason == "criteria")
        if reason is None:
            reason = self.name if num_emitted >= self.num_visible else record.stop_reason
        return replace(record, tokens=tokens, stop_reason=reason)

    def _end_of(self, tokens: Sequence[int], is_stopped: bool) -> str | None:
        if tokens[-1] in self.eos_ids:
            return "eos"
        return "criteria" if is_stopped else None


# Where a sequence stands within a step.
READING, READY, OFFERED, DRAFTED, IN_PASS = "prompt", "ready", "offered", "drafted", "in a pass"


class WrongOrderError(RuntimeError):
    """A call of a sequence came where another must come first."""


class RunningSequence:
    """A sequence that is decoded step by step.

    Args:
        target: the model.
        drafter: drafts for this sequence alone until it ends.
        request: what was asked for, checked.
        cache: may hold the first rows of the prompt, and has room for `rows_for`; None: a new one.

    Attributes:
        tokens: prompt and answer so far.
        cache: rows of all tokens but the last.
        num_cached: rows that it had before the prompt was read.
        stop_reason: None while the sequence goes on, else as in `StepRecord`.
    """

    def __init__(
        self, target: Backend, drafter: Drafter, request: Request, cache: Any = None
    ) -> None:
        self.target, self.drafter, self.request = target, drafter, request
        self.tokens = list(request.prompt_ids)
        self.stop_reason: str | None = None
        layers = drafter.needs.hidden_layers
        self.hidden: Hidden | None = target.hidden_states(layers) if layers else None
        if cache is None:
            cache = target.new_cache(rows_for(request, drafter))
        self.cache = cache
        self.num_cached = cache.length
        self._stop = request.stop and partial(_asked, request.stop)
        self._reference = ReferenceRows(target, self.cache, len(self.tokens))
        self._needs: Needs | None = None  # of the step under way, if it pauses
        self._margin = 0.0  # of near-ties in this step
        self._stage = READING
        drafter.start(request.prompt_ids)

    @property
    def num_new(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def needs(self) -> Needs:
        """Needs of the drafter in the step under way."""
        return self._needs or self.drafter.needs

    @property
    def num_read(self) -> int:
        """Candidates that are read after every node: near-ties need the two largest logits."""
        return max(self.needs.num_candidates, 2 if self._reference.margin else 1)

    def read_prompt(self) -> Iterator[int]:
        """Read the prompt chunk by chunk, and yield the tokens of each; the drafter learns from it."""
        target, drafter, hidden = self.target, self.drafter, self.hidden
        wanted = drafter.needs.wants_prompt_logits(target.head_share)
        chunks = target.prefill(self.tokens, self.cache, wanted)
        while True:
            with hidden.captured() if hidden else nullcontext():
                if (chunk := next(chunks, None)) is None:
                    break
                rows = hidden.take(len(chunk.token_ids)) if hidden else None
            self._reference.read_prompt(len(chunk.token_ids))
            if rows is not None:
                drafter.observe_prompt_hidden(chunk.token_ids, rows)
            if chunk.logits is not None:
                drafter.observe_prompt(chunk.token_ids, chunk.logits)
            yield len(chunk.token_ids)
        self._go(READING, READY)

    def _go(self, came_from: str, to: str) -> None:
        if self._stage != came_from:
            raise WrongOrderError(
                f"text: is {self._stage}; allowed: {came_from} (read the prompt; propose, pause, or offer and "
                "take; a pass; conclude)"
            )
        self._stage = to

    @property
    def budget(self) -> DraftBudget:
        """Limits of the next draft."""
        base = self.cache.length
        is_chain = self.target.chain_only_at(base, self.drafter.max_nodes)
        max_depth = min(self.request.context - 1 - base, self.target.max_depth_at(base))
        rule = self.request.rule
        sampling = rule if isinstance(rule, SamplingRule) else None
        return DraftBudget(max_depth, is_chain, sampling=sampling)

    def _begin(self, stage: str) -> None:
        """Begin a draft."""
        self._go(READY, stage)
        self._needs = None
        if self.request.guesses is not None:
            self.drafter.hint(self.request.guesses(self.tokens))

    def propose(self) -> DraftTree:
        """Return the drafter's tree for the next step."""
        self._begin(DRAFTED)
        budget = self.budget
        return self._checked(self.drafter.propose(self.tokens, budget), budget)

    def offer(self, most: int, least: float) -> Sequence[float] | None:
        """Return the acceptance probabilities of nodes to draft, as `Drafter.offer`; None: it only proposes."""
        self._begin(OFFERED)
        offered = self.drafter.offer(self.tokens, self.budget, most, least)
        if offered is None:
            self._go(OFFERED, READY)
        return offered

    def take(self, count: int) -> DraftTree:
        """Return the tree of the first `count` of the offered nodes."""
        self._go(OFFERED, DRAFTED)
        return self._checked(self.drafter.take(count), self.budget)

    def _checked(self, tree: DraftTree, budget: DraftBudget) -> DraftTree:
        tree.topology.check(budget.max_depth, budget.chain_only, self.drafter.max_nodes)
        return tree

    def pause(self) -> DraftTree:
        """Return the root alone, in place of `propose`; the drafter only takes note of the new token."""
        self._go(READY, DRAFTED)
        self._needs = replace(self.drafter.needs, num_candidates=0, logit_samples=False)
        return DraftTree.chain(self.tokens[-1:])

    def before_pass(self, tree: DraftTree, is_plain: bool = True) -> None:
        """Prepare for a pass over this draft; it is not plain if sequences share it (`SharedPasses.is_plain`)."""
        self._go(DRAFTED, IN_PASS)
        self._margin = self._reference.margin_of(tree, self.cache.length, is_plain)

    def forward(self, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits after every node [N, V], and their hidden states if the drafter reads them."""
        self.before_pass(tree)
        with self.hidden.captured() if self.hidden else nullcontext():
            logits = self.target.forward(tree, self.cache)
            return logits, self.hidden.take(len(logits)) if self.hidden else None

    def conclude(
        self,
        tree: DraftTree,
        logits: torch.Tensor,
        hidden: torch.Tensor | None,
        timer: StepTimer,
        read: Reader | None = None,
    ) -> StepRecord:
        """Accept what the model says, keep its rows, and let the drafter learn; return the step.

        Args:
            tree: of the pass, N nodes, whose rows are the last of the cache.
            logits: as from `forward`.
            hidden: likewise.
            timer: of the step.
            read: copies to the host what is read of the pass; None: the target's way.
        """
        self._go(IN_PASS, READY)
        request, base = self.request, self.cache.length - tree.topology.num_nodes
        acceptance = verify(
            tree,
            logits,
            request.rule,
            self.tokens,
            request.eos_ids,
            max_tokens=request.num_total - self.num_new,
            tie_margin=self._margin,
            num_candidates=self.needs.num_candidates,
            stop=self._stop,
            with_samples=self.needs.logit_samples,
            read=read or partial(self.target.read_out, self.cache),
        )
        timer.end("verify")
        self.cache.keep(base, acceptance.path)
        acceptance = self._settle(acceptance)
        timer.end("keep")
        if self._needs is not None and self.hidden is None:
            self.drafter.skip(acceptance.tokens)
        else:
            self.drafter.observe(VerifiedStep(tree, acceptance, self.stop_reason, hidden))
        timer.end("observe")
        return StepRecord(acceptance.tokens, tree, acceptance.path, self.stop_reason)

    @property
    def runs_on_device(self) -> bool:
        """Whether the next step can run whole on the device."""
        step = self._device_step
        return step is not None and step.fits(self.budget, self.tokens[-1])

    def run_on_device(self, timer: StepTimer) -> StepRecord:
        """Run a whole step on the device, where the drafter learns, too."""
        self._go(READY, READY)
        assert self._device_step is not None
        max_tokens = self.request.num_total - self.num_new
        tree, acceptance = self._device_step.run(self.tokens[-1], self.cache, max_tokens)
        timer.end("forward")
        acceptance = self._settle(acceptance)
        timer.end("keep")
        return StepRecord(acceptance.tokens, tree, acceptance.path, self.stop_reason)

    def _settle(self, acceptance: Acceptance) -> Acceptance:
        """Decide an open token, and take the new ones."""
        request = self.request
        acceptance = self._reference.with_token_decided(
            acceptance, self.tokens, request.rule, self._stop
        )
        self.tokens += acceptance.tokens
        self.stop_reason = request.stop_reason(acceptance, self.num_new)
        if self.stop_reason is None and self.target.reads_anew_at(self.cache.length):
            self._read_anew()
        return acceptance

    def _read_anew(self) -> None:
        """Read the text so far as if it were the prompt."""
        self.cache.keep(0, ())
        self._reference = ReferenceRows(self.target, self.cache, len(self.tokens))
        for chunk in self.target.prefill(self.tokens, self.cache, with_logits=False):
            self._reference.read_prompt(len(chunk.token_ids))

    @cached_property
    def _device_step(self) -> Any:
        """Steps that run whole on the device; None if request, drafter or target need the host."""
        drafting = self.drafter.on_device() if self.request.is_greedy else None
        if drafting is None:
            return None
        margin, ends = self._reference.margin, self.request.eos_ids
        return self.target.device_step(drafting, margin, ends)


def _asked(stop: Callable[[Sequence[int]], bool], text: Sequence[int]) -> bool:
    with as_in_transformers():
        return stop(text)


def rows_for(request: Request, drafter: Drafter) -> int:
    """Return the rows that a sequence's cache needs: prompt, answer and one draft tree."""
    return len(request.prompt_ids) + request.num_total + drafter.max_nodes
