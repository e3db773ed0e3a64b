"""The likeliest tokens of a step, and which of its rows belongs to which token of which request.

They come from a hook on vLLM's `LogitsProcessor`, before anything changes its logits.

vLLM computes 1 + s rows for a request, in the order of the batch, where s is how many of its
drafted tokens the scheduler took: all, or a prefix (token budget, grammar, end of the context), or
none (preemption). A drafter is not told s. It knows what it drafted, what was emitted and how many
rows there are in all, and these often determine every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch


class TopRows(NamedTuple):
    """The k likeliest tokens after each row of a step."""

    successors: np.ndarray  # the likeliest first, [R, k]
    shares: np.ndarray  # probabilities among these, [R, k]
    fed: (
        np.ndarray | None
    )  # token that each row was computed from, [R], for checks; None if not looked at


class LogitsHook:
    """Collects the likeliest tokens of every step.

    Args:
        target_model: vLLM's model.
        k: successors kept for a row.
        debug: whether to find out which token each row was computed from.

    Raises:
        RuntimeError: if the model has no `LogitsProcessor`.
    """

    def __init__(self, target_model: torch.nn.Module, k: int, debug: bool) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        processors = [m for m in target_model.modules() if isinstance(m, LogitsProcessor)]
        if not processors:
            raise RuntimeError(
                f"{type(target_model).__name__} has no LogitsProcessor: its logits cannot be seen"
            )
        self._k = k
        self._steps: list[TopRows] = []
        self._hidden: torch.Tensor | None = None
        self._input_ids: torch.Tensor | None = None
        for processor in processors:
            processor.register_forward_hook(self._on_logits)
        if debug:
            target_model.register_forward_hook(self._on_forward, with_kwargs=True)

    def take(self) -> TopRows | None:
        """Return the rows of the step since the last call; None unless there was exactly one.

        Logits of a prompt, which vLLM computes for `prompt_logprobs`, are a second one.
        """
        steps, self._steps = self._steps, []
        return steps[0] if len(steps) == 1 else None

    def _on_logits(self, module: torch.nn.Module, args: tuple[Any, ...], logits: Any) -> None:
        if logits is None:  # on ranks that do not gather them
            return
        values, ids = logits.topk(min(self._k, logits.shape[-1]), dim=-1)
        shares = values.float().softmax(dim=-1)
        self._steps.append(TopRows(ids.int().cpu().numpy(), shares.cpu().numpy(), self._fed(args)))

    def _on_forward(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._input_ids = kwargs.get("input_ids")
        self._hidden = output if torch.is_tensor(output) else None

    def _fed(self, args: tuple[Any, ...]) -> np.ndarray | None:
        """Return the token that the model was fed for each row [R], found by its hidden state; -1: not found."""
        if self._hidden is None or self._input_ids is None or len(args) < 2:
            return None
        is_same = (args[1][:, None] == self._hidden[None]).all(dim=-1)  # [R, tokens of the step]
        places = is_same.int().argmax(dim=1)
        fed = torch.where(is_same.any(dim=1), self._input_ids[places].long(), -1)
        return fed.cpu().numpy()


def align(
    num_drafted: Sequence[int], num_emitted: Sequence[int], num_rows: int
) -> list[list[int | None]]:
    """Return, for each request, the row of its last committed token and of each drafted token.

    A row is None if it cannot be determined, or may not exist.

    Args:
        num_drafted: tokens drafted for each request in the step before.
        num_emitted: tokens that each request emitted in this step; 0 in the middle of a prompt.
        num_rows: rows of logits of this step.
    """
    unknown: list[list[int | None]] = [[None] * (1 + drafted) for drafted in num_drafted]
    # Of d drafted tokens, at least the emitted ones but one were taken.
    most_cut = [
        drafted - max(emitted - 1, 0)
        for drafted, emitted in zip(num_drafted, num_emitted, strict=True)
    ]
    num_cut = sum(num_drafted) + len(num_drafted) - num_rows
    total = sum(most_cut)
    if min(most_cut, default=0) < 0 or not 0 <= num_cut <= total:
        return unknown  # not a step that these drafts led to
    before = [0, *accumulate(most_cut)]  # most that can be cut of the requests before
    start = 0  # row of the request if nothing is cut before it
    for index, drafted in enumerate(num_drafted):
        least_before = max(0, num_cut - (total - before[index]))
        if least_before == min(num_cut, before[index]):
            first = start - least_before
            known = 1 + drafted - min(num_cut, most_cut[index])
            for place in range(known):
                unknown[index][place] = first + place
        start += 1 + drafted
    return unknown
