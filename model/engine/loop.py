"""The loop: propose a tree, verify it in one forward pass, keep the accepted rows, learn from it.

The inference commands, the library and the tests all use this one loop. Vanilla is the empty draft through it. A
step's parts are those of a sequence (`model.engine.sequence`); sequences that share passes are stepped by
`model.engine.batch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .backend import Backend, PrefixRows
from .drafter import Drafter
from .sequence import Request, RunningSequence, rows_for
from .step import Generation, StepRecord, StepTimer


def generate(
    target: Backend, drafter: Drafter, prompt_ids: Sequence[int], **options: Any
) -> Generation:
    """Run `decode` (same options) to its end and collect its steps."""
    generation = Generation()
    for step in decode(target, drafter, prompt_ids, **options):
        generation.token_ids += step.tokens
        generation.steps.append(step)
    return generation


def decode(
    target: Backend,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    prefix_cache: PrefixRows | None = None,
    **options: Any,
) -> Iterator[StepRecord]:
    """Yield the steps of decoding a prompt; `options` are those of a `Request`, errors as `steps_of`."""
    return steps_of(target, drafter, Request(prompt_ids, **options), prefix_cache)


@torch.inference_mode()
def steps_of(
    target: Backend, drafter: Drafter, request: Request, prefix_cache: PrefixRows | None = None
) -> Iterator[StepRecord]:
    """Yield the steps of a sequence.

    Args:
        target: the model.
        drafter: the method.
        request: what is asked for.
        prefix_cache: holds earlier sequences' rows, reused for a common beginning; then holds this sequence's, too.

    Raises:
        ValueError: as `Request.checked`.
    """
    request = request.checked(target, drafter.needs.overrun)
    drafter = drafter.for_target(target)
    if drafter.needs.hidden_layers:
        prefix_cache = None  # rows that are not read again show no hidden states
    timer = StepTimer()
    cache = None
    if prefix_cache is not None:
        cache = prefix_cache.open(target, request.prompt_ids, rows_for(request, drafter))
    sequence = RunningSequence(target, drafter, request, cache)
    for _ in sequence.read_prompt():
        pass
    if prefix_cache is not None:
        sequence.cache.mark()  # the next prompt may go on from the end of this one
    target.synchronize()
    prefill_ns, num_cached = timer.end("prefill"), sequence.num_cached
    while sequence.stop_reason is None:
        record = step_of(sequence)
        if prefix_cache is not None:
            prefix_cache.store(sequence.cache, sequence.tokens)
        if visible := request.visible(record, sequence.num_new):
            visible.prefill_ns, visible.num_cached = prefill_ns, num_cached
            prefill_ns = num_cached = 0
            yield visible


def step_of(sequence: RunningSequence) -> StepRecord:
    """Decode a step of a sequence whose prompt is read, in a pass of its own."""
    timer = StepTimer()
    if sequence.runs_on_device:
        record = sequence.run_on_device(timer)
    else:
        tree = sequence.propose()
        timer.end("draft")
        logits, hidden = sequence.forward(tree)
        timer.end("forward")
        record = sequence.conclude(tree, logits, hidden, timer)
    record.set_times(timer)
    return record
