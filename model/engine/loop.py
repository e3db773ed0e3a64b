"""The loop: propose a tree, verify it in one forward pass, keep the accepted rows, learn from it.

Everything stands on this one generator: the inference commands, the library and the tests. Plain
decoding is the empty draft through the same loop. The prompt is read up to its last token, which is
the first tree's root, so that acceptance lengths sum exactly to the number of new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from .budget import DraftBudget
from .cache import TreeCache
from .drafter import Drafter, VerifiedStep
from .limits import Limits
from .prefix_cache import PrefixCache
from .reference_rows import ReferenceRows
from .rules import TokenRule
from .step import DeviceStep, Generation, Laps, StepRecord
from .target import TargetModel
from .verification import verify

# Share of the model's weights up to which an output head is cheap to run on the whole prompt.
CHEAP_HEAD = 0.1


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
    is_greedy = rule is None and stop is None
    # Unseen steps would draw from the generator that the next answer goes on with, and ask the
    # user's criteria about tokens that never come.
    overrun = drafter.quirks.overrun if is_greedy else 0
    limits = Limits.of(target, prompt_ids, max_new_tokens, eos_ids, overrun)
    drafter = drafter.for_target(target)
    text, num_emitted = list(prompt_ids), 0
    laps = Laps()
    cache, reference = _read_prompt(target, drafter, text, limits, prefix_cache)
    prefill_ns = laps.end("prefill")
    on_device = _device_step(target, drafter, reference, eos_ids) if is_greedy else None
    stop_reason = None
    while stop_reason is None:
        laps = Laps()
        base, room = cache.length, limits.num_total - num_emitted
        is_chain = target.chain_only_at(base, drafter.max_nodes)
        budget = DraftBudget(limits.context - 1 - base, is_chain)
        if is_whole := on_device is not None and on_device.fits(budget, text[-1]):
            tree, acceptance = on_device.run(text[-1], cache, room)
            laps.end("forward")
        else:
            tree = drafter.propose(text, budget)
            budget.check(tree.topology)
            laps.end("draft")
            logits = target.forward(tree, cache)
            laps.end("forward")
            acceptance = verify(
                tree,
                logits,
                rule,
                text,
                eos_ids,
                max_tokens=room,
                tie_margin=reference.margin_of(tree, base),
                num_candidates=drafter.num_candidates,
                stop=stop,
                with_probes=drafter.wants_probes,
            )
            laps.end("verify")
            cache.keep(base, acceptance.path)
        acceptance = reference.settled(acceptance, text, rule, stop)
        laps.end("keep")
        text += acceptance.tokens
        num_emitted += len(acceptance.tokens)
        stop_reason = limits.stop_reason(acceptance, num_emitted)
        if not is_whole:  # else the drafter has learned within the step
            drafter.observe(VerifiedStep(tree, acceptance, stop_reason))
        laps.end("observe")
        if prefix_cache is not None:
            prefix_cache.store(cache, text)
        record = StepRecord(
            acceptance.tokens, tree, acceptance.path, stop_reason, prefill_ns, *laps.parts()
        )
        if visible := limits.visible(record, acceptance.is_stopped, num_emitted):
            yield visible
            prefill_ns = 0


def _read_prompt(
    target: TargetModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    limits: Limits,
    prefix_cache: PrefixCache | None,
) -> tuple[TreeCache, ReferenceRows]:
    """Read the prompt up to its last token; the drafter learns from it."""
    capacity = len(prompt_ids) + limits.num_total + drafter.max_nodes
    if prefix_cache is not None:
        cache = prefix_cache.open(target, prompt_ids, capacity)
    else:
        cache = target.new_cache(capacity)
    reference = ReferenceRows(target, cache, len(prompt_ids))
    drafter.start(prompt_ids)
    for chunk in target.prefill(prompt_ids, cache, _is_harvested(target, drafter)):
        reference.read_prompt(len(chunk.token_ids))
        if chunk.logits is not None:
            drafter.observe_prompt(chunk.token_ids, chunk.logits)
    target.synchronize()
    return cache, reference


def _is_harvested(target: TargetModel, drafter: Drafter) -> bool:
    """Whether the prompt's logits are computed for the drafter.

    One that counts costs leaves it open and has them where they are cheap: the output head is run
    on every prompt token for them, and no later step repays a head that is a large part of the
    model.
    """
    if drafter.harvests_prompt is None:
        return target.head_share <= CHEAP_HEAD
    return drafter.harvests_prompt


def _device_step(
    target: TargetModel, drafter: Drafter, reference: ReferenceRows, eos_ids: Collection[int]
) -> DeviceStep | None:
    """Return the drafter's steps whole on the device; None if drafter or target work on the host."""
    drafting = drafter.on_device()
    if drafting is None:
        return None
    return target.device_step(drafting, reference.margin, eos_ids)
