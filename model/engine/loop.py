"""The loop: propose a tree, verify it in one forward pass, keep the accepted rows, learn from it.

The inference commands, the library and the tests all use this one loop. Vanilla is the empty draft through it. A
step's parts are those of a text (`model.engine.text`); texts that share passes are stepped by `model.engine.batch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .backend import Backend, KeptRows
from .drafter import Drafter
from .step import Generation, StepRecord, StepTimer
from .text import Request, Text, rows_for


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
    prefix_cache: KeptRows | None = None,
    **options: Any,
) -> Iterator[StepRecord]:
    """Yield the steps of decoding a prompt; `options` are those of a `Request`, errors as `steps_of`."""
    return steps_of(target, drafter, Request(prompt_ids, **options), prefix_cache)


@torch.inference_mode()
def steps_of(
    target: Backend,
    drafter: Drafter,
    request: Request,
    prefix_cache: KeptRows | None = None,
) -> Iterator[StepRecord]:
    """Yield the steps of a text.

    Args:
        target: the model.
        drafter: the method.
        request: what is asked for.
        prefix_cache: holds the last text's rows, reused for a common beginning; then holds this text's.

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
    text = Text(target, drafter, request, cache)
    for _ in text.read_prompt():
        pass
    if prefix_cache is not None:
        text.cache.mark()  # the next prompt may go on from the end of this one
    target.synchronize()
    prefill_ns = timer.end("prefill")
    while text.stop_reason is None:
        record = step_of(text)
        if prefix_cache is not None:
            prefix_cache.store(text.cache, text.tokens)
        if visible := request.visible(record, text.num_new):
            visible.prefill_ns, prefill_ns = prefill_ns, 0
            yield visible


def step_of(text: Text) -> StepRecord:
    """Decode a step of a text whose prompt is read, in a pass of its own."""
    timer = StepTimer()
    if text.runs_on_device:
        record = text.run_on_device(timer)
    else:
        tree = text.propose()
        timer.end("draft")
        logits, hidden = text.forward(tree)
        timer.end("forward")
        record = text.conclude(tree, logits, hidden, timer)
    record.set_times(timer)
    return record
