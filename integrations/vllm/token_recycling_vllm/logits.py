"""The likeliest tokens of a step, from a hook on vLLM's `LogitsProcessor`, before anything changes its logits."""

from __future__ import annotations

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
