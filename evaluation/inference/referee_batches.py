"""Referees for batches: transformers' own ways to answer several prompts at a time, greedily."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from transformers import StoppingCriteriaList

from evaluation.answers.row import Turn
from evaluation.inference.question import BatchAnswerer, Failure, Prompt
from model.engine.target import TargetModel

# Prompts given to `generate_batch` at a time, in batches: those that wait take the place of texts that end.
QUEUED_BATCHES = 4
# Tokens of a page of its cache: its default.
PAGE = 256


class _RefereeBatch(BatchAnswerer):
    """Prompts that are answered together once all are asked; `settings` are further arguments of `generate`."""

    num_waiting = 1  # prompts asked together, for each one that shares a pass

    def __init__(
        self,
        target: TargetModel,
        max_new_tokens: int,
        eos_ids: Collection[int],
        size: int,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.size, self._num_shared, self._settings = self.num_waiting * size, size, settings
        self._target, self._max_new_tokens, self._eos_ids = target, max_new_tokens, eos_ids
        self._asked: dict[int, list[int]] = {}

    def ask(self, slot: int, prompt: Prompt) -> None:
        self._room(prompt.token_ids)
        self._asked[slot] = prompt.token_ids

    def ended(self) -> list[tuple[int, Turn | Failure]]:
        asked, self._asked = self._asked, {}
        answers: Sequence[Turn | Failure]
        try:
            answers = self._answers(list(asked.values()))
        except Exception as error:
            answers = [Failure.of(error)] * len(asked)
        return list(zip(asked, answers, strict=True))

    def _answers(self, prompts: Sequence[list[int]]) -> list[Turn]:
        """Return the answer to each prompt."""
        raise NotImplementedError

    def _room(self, prompt_ids: Sequence[int]) -> int:
        """Return the most new tokens: our methods stop at the end of the model's context, transformers does not."""
        limit = self._target.context_limit(len(prompt_ids))
        room = self._max_new_tokens if limit is None else limit - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"prompt: got {len(prompt_ids)} tokens; allowed: fewer than the model's context of {limit}"
            )
        return min(self._max_new_tokens, room)

    def _turn(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        wall_time: float,
        **seconds: float,
    ) -> Turn:
        """Return an answer, cut at its own end of text and limit."""
        token_ids = token_ids[: self._room(prompt_ids)]
        ends = (
            place
            for place, token in enumerate(token_ids, 1)
            if token in self._eos_ids or self._is_stopped([*prompt_ids, *token_ids[:place]])
        )
        token_ids = list(token_ids[: next(ends, len(token_ids))])
        details = {"prompt_tokens": len(prompt_ids), **seconds}
        return Turn(token_ids, [1] * len(token_ids), wall_time, details)

    def _is_stopped(self, text: list[int]) -> bool:
        criteria = self._settings.get("stopping_criteria") or StoppingCriteriaList()
        return bool(criteria) and bool(criteria(torch.tensor([text]), None))


class PaddedBatch(_RefereeBatch):
    """`generate` on a batch that is padded on the left: all texts wait for the longest."""

    @torch.inference_mode()
    def _answers(self, prompts: Sequence[list[int]]) -> list[Turn]:
        longest = max(map(len, prompts))
        self._target.synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        output = self._target.model.generate(
            **left_padded(prompts, self._target.device),
            do_sample=False,
            max_new_tokens=max(map(self._room, prompts)),
            eos_token_id=sorted(self._eos_ids) or None,
            pad_token_id=min(self._eos_ids, default=0),
            **self._settings,
        )
        found = output[:, longest:].tolist()
        wall_time, cpu_time = time.perf_counter() - start, time.process_time() - cpu_start
        shares = {"share_time": wall_time / len(prompts), "cpu_time": cpu_time / len(prompts)}
        return [
            self._turn(prompt, token_ids, wall_time, **shares)
            for prompt, token_ids in zip(prompts, found, strict=True)
        ]


def left_padded(prompts: Sequence[list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of `generate` for B prompts, the longest of P tokens: ids and mask, [B, P] each.

    A prompt is padded with a token of its own: a repetition penalty counts hidden tokens too.
    """
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [prompt[:1] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * count + [1] * (longest - count) for count in padding]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


class ContinuousBatch(_RefereeBatch):
    """`generate_batch`, transformers' continuous batching, of more prompts than share a pass.

    Time is counted from the first text's begin on: what transformers does before and after is left out.
    """

    num_waiting = QUEUED_BATCHES

    def _answers(self, prompts: Sequence[list[int]]) -> list[Turn]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        longest, most = max(map(len, prompts)), max(map(self._room, prompts))
        # As large as the texts need, not as the device's memory is: other entrants need some of it.
        config = ContinuousBatchingConfig(
            max_requests_per_batch=self._num_shared,
            num_blocks=self._num_shared * (1 + math.ceil((longest + most) / PAGE)),
            max_batch_tokens=max(PAGE, self._num_shared * longest),
        )
        generation = GenerationConfig(
            do_sample=False,
            max_new_tokens=most,
            eos_token_id=sorted(self._eos_ids) or -1,
            pad_token_id=min(self._eos_ids, default=0),
        )
        outputs = self._target.model.generate_batch(
            list(prompts), generation_config=generation, continuous_batching_config=config
        )
        found = list(outputs.values())
        if errors := [one.error for one in found if one.error is not None]:
            raise RuntimeError(f"generate_batch: {errors[0]}")
        if len(found) < len(prompts):
            raise RuntimeError(f"generate_batch: {len(found)} of {len(prompts)} prompts answered")
        times = [one.lifespan[1] - one.lifespan[0] for one in found]
        begin = min(one.lifespan[0] for one in found)
        under_way = sum(times) / (max(one.lifespan[1] for one in found) - begin)
        return [
            self._turn(prompt, one.generated_tokens, seconds, share_time=seconds / under_way)
            for prompt, one, seconds in zip(prompts, found, times, strict=True)
        ]
