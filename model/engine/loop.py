"""The loop: propose a tree, verify it in one forward pass, keep the accepted rows, learn from it.

Everything stands on this one generator: the inference commands, the library and the tests. Plain
decoding is the empty draft through the same loop. The prompt is read up to its last token, which is
the first tree's root, so that acceptance lengths sum exactly to the number of new tokens.

Floating-point sums depend on the shape of a pass, so that two logits that differ by rounding alone
may change places between a tree and a single token. In float32 such a near-tie is decided by the
very arithmetic of plain decoding, so that the tokens are equal, not only almost always equal.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .cache import TreeCache
from .drafter import Drafter, VerifiedStep
from .prefix_cache import PrefixCache
from .target import TargetModel
from .tree import DraftBudget, DraftTree
from .verification import TokenRule, decides_near_ties, verify

# Two logits closer than this many rounding steps of the larger may change places with the shape of
# a forward pass; the noise measured on the demo model in float32 is 6 such steps.
TIE_STEPS = 256
# Share of the model's weights up to which an output head is cheap to run on the whole prompt.
CHEAP_HEAD = 0.1
# Depth allowed to drafts where the model sets no limit to its context.
MAX_UNLIMITED_DRAFT = 4096


@dataclass(slots=True)
class StepRecord:
    """One step of decoding.

    Attributes:
        tokens: emitted token ids, never past the end of text or the limit.
        tree: the verified draft.
        path: accepted nodes from the root downward.
        stop_reason: None while the text goes on, else "eos", "criteria" (`stop` said so), "length"
            (max_new_tokens) or "context" (full).
        prefill_ns: time of reading the prompt, on the first step; 0 on others.
        draft_ns, forward_ns, verify_ns, keep_ns, observe_ns: time of each part. The host waits for
            the device in verify alone, so that on a GPU the forward pass is paid there. A whole step
            on the device is one part, counted as forward.
    """

    tokens: list[int]
    tree: DraftTree
    path: list[int]
    stop_reason: str | None = None
    prefill_ns: int = 0
    draft_ns: int = 0
    forward_ns: int = 0
    verify_ns: int = 0
    keep_ns: int = 0
    observe_ns: int = 0

    @property
    def num_nodes(self) -> int:
        """Nodes verified, root included."""
        return self.tree.topology.num_nodes

    @property
    def accepted_nodes(self) -> list[int]:
        """Drafted nodes whose tokens were emitted: node `path[i + 1]` guessed `tokens[i]`."""
        return self.path[1 : 1 + len(self.tokens)]


@dataclass(slots=True)
class Generation:
    """A whole answer.

    Attributes:
        token_ids: new tokens.
        steps: a record of every step, in order.
    """

    token_ids: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens emitted by each step, bonus token included; their sum is the number of new tokens."""
        return [len(step.tokens) for step in self.steps]


def generate(
    target: TargetModel, drafter: Drafter, prompt_ids: Sequence[int], **options: Any
) -> Generation:
    """Run `decode` (same options) to its end and collect its steps."""
    generation = Generation()
    for step in decode(target, drafter, prompt_ids, **options):
        generation.token_ids += step.tokens
        generation.steps.append(step)
    return generation


@torch.inference_mode()
def decode(
    target: TargetModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    rule: TokenRule | None = None,
    stop: Callable[[Sequence[int]], bool] | None = None,
    prefix_cache: PrefixCache | None = None,
) -> Iterator[StepRecord]:
    """Yield the steps of decoding `prompt_ids`.

    Args:
        target: the model.
        drafter: the method.
        prompt_ids: token ids of the prompt, at least one.
        max_new_tokens: limit; exact for every method.
        eos_ids: token ids that end the text; the one that ends it is emitted.
        rule: None for greedy decoding, else how each token is chosen.
        stop: asked after every new token, with the text so far, whether it ends the text.
        prefix_cache: the rows of the last text, for the prompt's beginning if it is the same, and
            then of this one.

    Raises:
        ValueError: if the prompt is empty or leaves no room in the context, or max_new_tokens < 1.
    """
    limits = _limits(
        target, drafter, prompt_ids, max_new_tokens, may_overrun=rule is None and stop is None
    )
    if drafter.wants_prices and drafter.costs is None:
        drafter.costs = target.step_costs.fresh(drafter.draft_costs())
    costs = drafter.costs
    sequence = list(prompt_ids)
    num_emitted = 0
    clock = time.perf_counter_ns
    started = clock()
    capacity = len(sequence) + limits.num_total + drafter.max_nodes
    cache = (
        prefix_cache.open(target, sequence, capacity)
        if prefix_cache
        else target.new_cache(capacity)
    )
    num_reused = cache.length
    drafter.start(sequence)
    is_plain = not num_reused
    for chunk in target.prefill(sequence, cache, _is_harvested(target, drafter)):
        is_plain = is_plain and target.is_plain(len(chunk.token_ids))
        if chunk.logits is not None:
            drafter.observe_prompt(chunk.token_ids, chunk.logits)
    target.synchronize()
    prefill_ns = clock() - started
    # Rows computed as plain decoding computes them.
    num_plain = cache.length if is_plain else 0
    tie_margin = _tie_margin(target)
    is_greedy = rule is None and stop is None
    whole_step = target.whole_step(drafter, tie_margin, eos_ids) if is_greedy else None
    stop_reason = None
    while stop_reason is None:
        base = cache.length
        num_compiled = target.num_compiled
        times = [clock()]
        is_resting = costs is not None and costs.pace.is_resting
        budget = DraftBudget(
            limits.context - 1 - base,
            target.chain_only_at(base, drafter.max_nodes),
            costs.at(base) if costs and not is_resting else None,
        )
        whole = whole_step if whole_step and whole_step.fits(budget, sequence[-1]) else None
        room = limits.num_total - num_emitted
        if whole:
            times.append(clock())
            tree, acceptance = whole.run(sequence[-1], cache, room)
            is_plain = False
            times += [clock()] * 2
        else:
            if is_resting:
                tree = DraftTree.chain(sequence[-1:], target.device)
            else:
                tree = drafter.propose(sequence, budget)
                budget.check(tree.topology)
            times.append(clock())
            logits = target.forward(tree, cache)
            times.append(clock())
            is_plain = (
                tree.topology.num_nodes == 1 and num_plain == base and target.is_plain(num_rows=1)
            )
            margin = 0.0 if is_plain else tie_margin
            num_candidates = 0 if is_resting else drafter.num_candidates
            with_probes = drafter.wants_probes and not is_resting
            acceptance = verify(
                *(tree, logits, rule, sequence, eos_ids, room),
                *(margin, num_candidates, stop, with_probes),
            )
            times.append(clock())
            cache.keep(base, acceptance.path)
        if not acceptance.is_decided:
            text = sequence + acceptance.tokens
            start = len(prompt_ids)
            token = _plain_token(target, cache, text, start, num_plain, rule)
            is_stopped = stop is not None and stop([*text, token])
            acceptance = acceptance.decided(token, is_stopped)
            is_plain = True
        if is_plain:
            num_plain = cache.length
        times.append(clock())
        tokens = acceptance.tokens
        visible = tokens[: max(0, limits.num_visible - num_emitted)]
        sequence += tokens
        num_emitted += len(tokens)
        has_ended = tokens[-1] in eos_ids
        # The published loop looks at its limit before it looks for a bonus token that ends the text.
        is_full = num_emitted >= limits.num_total
        stop_reason = limits.stop_reason(
            has_ended and not is_full, acceptance.is_stopped, num_emitted, limits.num_total
        )
        if is_resting:
            drafter.skip(tokens)
        elif not whole:
            drafter.observe(VerifiedStep(tree, acceptance, stop_reason))
        times.append(clock())
        if costs and target.num_compiled == num_compiled:
            costs.learn(tree.topology.num_nodes, len(tokens), base, times[-1] - times[0])
        if prefix_cache is not None:
            prefix_cache.store(cache, sequence)
        if visible:
            has_ended = visible[-1] in eos_ids
            reason = limits.stop_reason(
                has_ended, acceptance.is_stopped, num_emitted, limits.num_visible
            )
            parts = [end - begin for begin, end in pairwise(times)]
            yield StepRecord(visible, tree, acceptance.path, reason, prefill_ns, *parts)
            prefill_ns = 0


def _is_harvested(target: TargetModel, drafter: Drafter) -> bool:
    """Whether the prompt's logits are computed for the drafter.

    One that counts costs leaves it open and has them where they are cheap: the output head is run
    on every prompt token for them, and no later step repays a head that is a large part of the
    model.
    """
    if drafter.harvests_prompt is None:
        return target.head_share <= CHEAP_HEAD
    return drafter.harvests_prompt


def _tie_margin(target: TargetModel) -> float:
    """Return the relative difference of logits below which their order is decided plainly; 0: never."""
    if not decides_near_ties(target.dtype):
        return 0.0
    # float32 also for float64: verification compares the logits in float32.
    return TIE_STEPS * torch.finfo(torch.float32).eps


def _plain_token(
    target: TargetModel,
    cache: TreeCache,
    text: Sequence[int],
    prompt_length: int,
    num_plain: int,
    rule: TokenRule | None,
) -> int:
    """Return the token that plain decoding puts after `text`, to the last bit.

    The rows from `num_plain` on are computed again, those of new tokens one at a time, as plain
    decoding does: the same shapes round alike. Rare enough to cost nothing that can be measured.
    """
    cache.keep(num_plain, ())
    with target.plainly():
        for _ in target.prefill(text[:prompt_length], cache, with_logits=False):
            pass  # nothing is left of the prompt where its rows are plain
        for token in text[cache.length :]:
            logits = target.forward(DraftTree.chain([token], target.device), cache)
    chosen = None if rule is None else rule.choose(logits[-1], text)
    return int(logits[-1].argmax()) if chosen is None else chosen


class _Limits(NamedTuple):
    """How far an answer may go, in tokens.

    Attributes:
        context: prompt and answer together.
        num_visible: new tokens that are emitted.
        num_total: new tokens until the loop ends; more than are emitted where a drafter overruns.
        name: which limit the answer meets first, "length" or "context".
    """

    context: int
    num_visible: int
    num_total: int
    name: str

    def stop_reason(
        self, has_ended: bool, is_stopped: bool, num_emitted: int, limit: int
    ) -> str | None:
        """Return why the text ends after `num_emitted` tokens, None if it goes on."""
        if has_ended:
            return "eos"
        if is_stopped:
            return "criteria"
        return self.name if num_emitted >= limit else None


def _limits(
    target: TargetModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    may_overrun: bool,
) -> _Limits:
    """Check a request, and return its limits."""
    limit = operator.index(max_new_tokens) if hasattr(max_new_tokens, "__index__") else 0
    if limit < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}; allowed: integers of 1 or more")
    if not prompt_ids:
        raise ValueError("prompt: got no token; allowed: at least one")
    context = target.context_limit(len(prompt_ids))
    if context is None:
        context = len(prompt_ids) + limit + MAX_UNLIMITED_DRAFT
    room = context - len(prompt_ids)
    if room < 1:
        raise ValueError(
            f"prompt: got {len(prompt_ids)} tokens; allowed: fewer than the model's context of "
            f"{context}; shorten the prompt"
        )
    num_visible = min(limit, room)
    # Unseen steps would draw from the generator that the next answer goes on with, and ask the
    # user's criteria about tokens that never come.
    overrun = drafter.overrun if may_overrun else 0
    name = "length" if num_visible == limit else "context"
    return _Limits(context, num_visible, min(num_visible + overrun, room), name)
