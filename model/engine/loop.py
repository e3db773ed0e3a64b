"""The loop: propose a tree, verify it in one forward pass, keep the accepted rows, learn from it.

The inference commands, the library and the tests all use this one generator. Vanilla is the empty
draft through the same loop. A step's parts are those of a text (`model.engine.text`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from .drafter import Drafter
from .prefix_cache import PrefixCache
from .request import Request
from .rules import TokenRule
from .step import Generation, Laps, StepRecord
from .target import TargetModel
from .text import Text, rows_for


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
    cache = None
    if prefix_cache is not None:
        cache = prefix_cache.open(target, prompt_ids, rows_for(prompt_ids, request, drafter))
    text = Text(target, drafter, prompt_ids, request, cache)
    for _ in text.read_prompt():
        pass
    if prefix_cache is not None:
        text.cache.mark()  # the next prompt may go on from the end of this one
    target.synchronize()
    prefill_ns = laps.end("prefill")
    while text.stop_reason is None:
        record = _step(text)
        if prefix_cache is not None:
            prefix_cache.store(text.cache, text.tokens)
        if visible := text.visible(record):
            visible.prefill_ns, prefill_ns = prefill_ns, 0
            yield visible


def _step(text: Text) -> StepRecord:
    laps = Laps()
    if text.runs_on_device:
        record = text.run_on_device(laps)
    else:
        tree = text.propose()
        laps.end("draft")
        logits, hidden = text.forward(tree)
        laps.end("forward")
        record = text.conclude(tree, logits, hidden, laps)
    record.set_times(laps)
    return record
