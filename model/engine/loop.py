"""The loop: propose a tree, verify it in one forward pass, keep the accepted rows, learn from it.

The inference commands, the library and the tests all use this one generator. Vanilla is the empty
draft through the same loop. The prompt is read up to its last token, which is
the first tree's root, so that acceptance lengths sum exactly to the number of new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from .budget import DraftBudget
from .cache import TreeCache
from .drafter import Drafter, VerifiedStep
from .near_ties import ReferenceRows
from .passes.device_step import DeviceStep
from .passes.hidden import HiddenStates
from .prefix_cache import PrefixCache
from .request import Request
from .rules import TokenRule
from .step import Generation, Laps, StepRecord
from .target import TargetModel
from .verification import verify


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
        prefix_cache: holds the last text's rows, reused for a common beginning; then holds this text's.

    Raises:
        ValueError: if the prompt is empty or leaves no room in the context, or max_new_tokens < 1.
    """
    overrun = drafter.needs.overrun
    request = Request.of(target, prompt_ids, max_new_tokens, eos_ids, rule, stop, overrun)
    drafter = drafter.for_target(target)
    if drafter.needs.hidden_layers:
        prefix_cache = None  # rows that are not read again show no hidden states
    laps = Laps()
    cache, reference = _read_prompt(target, drafter, prompt_ids, request, prefix_cache)
    prefill_ns = laps.end("prefill")
    for record, text in _steps(target, drafter, prompt_ids, request, cache, reference):
        if prefix_cache is not None:
            prefix_cache.store(cache, text)
        if visible := request.visible(record, len(text) - len(prompt_ids)):
            visible.prefill_ns, prefill_ns = prefill_ns, 0
            yield visible


def _steps(
    target: TargetModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    request: Request,
    cache: TreeCache,
    reference: ReferenceRows,
) -> Iterator[tuple[StepRecord, list[int]]]:
    """Yield each step, unseen ones included, with the text after it."""
    text, stop_reason = list(prompt_ids), None
    on_device = _device_step(target, drafter, request, reference)
    hidden = _hidden_states(target, drafter)
    while stop_reason is None:
        laps = Laps()
        base, room = cache.length, request.num_total - (len(text) - len(prompt_ids))
        is_chain = target.chain_only_at(base, drafter.max_nodes)
        budget = DraftBudget(request.context - 1 - base, is_chain)
        if is_whole := on_device is not None and on_device.fits(budget, text[-1]):
            tree, acceptance = on_device.run(text[-1], cache, room)
            laps.end("forward")
        else:
            tree = drafter.propose(text, budget)
            budget.check(tree.topology)
            laps.end("draft")
            margin = reference.margin_of(tree, base)
            with hidden.captured() if hidden else nullcontext():
                logits = target.forward(tree, cache)
                rows = hidden.take(tree.topology.num_nodes) if hidden else None
            laps.end("forward")
            acceptance = verify(
                tree,
                logits,
                request.rule,
                text,
                request.eos_ids,
                max_tokens=room,
                tie_margin=margin,
                num_candidates=drafter.needs.num_candidates,
                stop=request.stop,
                with_sketches=drafter.needs.sketches,
                read=partial(target.read_out, cache),
            )
            laps.end("verify")
            cache.keep(base, acceptance.path)
        acceptance = reference.with_token_decided(acceptance, text, request.rule, request.stop)
        laps.end("keep")
        text += acceptance.tokens
        stop_reason = request.stop_reason(acceptance, len(text) - len(prompt_ids))
        if not is_whole:  # a whole step has taught the drafter already
            drafter.observe(VerifiedStep(tree, acceptance, stop_reason, rows))
        laps.end("observe")
        tokens, path = acceptance.tokens, acceptance.path
        yield StepRecord(tokens, tree, path, stop_reason, 0, *laps.parts()), text


def _read_prompt(
    target: TargetModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    request: Request,
    prefix_cache: PrefixCache | None,
) -> tuple[TreeCache, ReferenceRows]:
    """Read the prompt up to its last token; the drafter learns from it."""
    capacity = len(prompt_ids) + request.num_total + drafter.max_nodes
    if prefix_cache is not None:
        cache = prefix_cache.open(target, prompt_ids, capacity)
    else:
        cache = target.new_cache(capacity)
    reference = ReferenceRows(target, cache, len(prompt_ids))
    drafter.start(prompt_ids)
    hidden = _hidden_states(target, drafter)
    with hidden.captured() if hidden else nullcontext():
        for chunk in target.prefill(prompt_ids, cache, _is_harvested(target, drafter)):
            reference.read_prompt(len(chunk.token_ids))
            if hidden:
                rows = hidden.take(len(chunk.token_ids))
                drafter.observe_prompt_hidden(chunk.token_ids, rows)
            if chunk.logits is not None:
                drafter.observe_prompt(chunk.token_ids, chunk.logits)
    if prefix_cache is not None:
        cache.mark()  # the next prompt may go on from the end of this one
    target.synchronize()
    return cache, reference


def _is_harvested(target: TargetModel, drafter: Drafter) -> bool:
    """Whether the prompt's logits are computed for the drafter: where it leaves that open, if they are cheap."""
    wanted = drafter.needs.prompt_logits
    return target.head_share <= drafter.needs.cheap_head if wanted is None else wanted


def _hidden_states(target: TargetModel, drafter: Drafter) -> HiddenStates | None:
    layers = drafter.needs.hidden_layers
    return target.hidden_states(layers) if layers else None


def _device_step(
    target: TargetModel, drafter: Drafter, request: Request, reference: ReferenceRows
) -> DeviceStep | None:
    """Return steps that run whole on the device; None if request, drafter or target need the host."""
    drafting = drafter.on_device() if request.is_greedy else None
    if drafting is None:
        return None
    return target.shapes.device_step(drafting, reference.margin, request.eos_ids)
