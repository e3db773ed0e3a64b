"""Referees: transformers' own ways to decode, which show that the baseline is a fair one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import transformers
from transformers import StoppingCriteriaList, StopStringCriteria

from evaluation.answers.row import Turn
from evaluation.inference.config import DecodingOptions, RunConfig
from evaluation.inference.question import Answerer
from evaluation.inference.referee_batches import ContinuousBatch, PaddedBatch
from model.commands.command_line import UserError
from model.engine.target import TargetModel
from model.methods.sps.drafter import load_draft_model
from model.options import Options, option

GENERATE, LOOKUP, ASSISTED = "generate", "generate-pld", "generate-assisted"
CONTINUOUS = "generate-batch"
BATCHES = {GENERATE: PaddedBatch, CONTINUOUS: ContinuousBatch}


@dataclass(frozen=True, slots=True)
class RefereeConfig(Options):
    """Options of `generate` beyond greedy decoding.

    Raises:
        ValueError: if a value is not allowed.
    """

    prompt_lookup_num_tokens: int | None = option(None, "tokens of a prompt lookup", least=1)
    draft_model: str | None = option(None, "folder or hub name of the assistant")


@dataclass(frozen=True, slots=True)
class Referee:
    """One of transformers' ways to decode: plain, by prompt lookup, assisted by a draft model, or in batches."""

    name: str

    config_class: ClassVar[type] = RefereeConfig
    # Whether it must be told how long a text can grow.
    needs_longest_text: ClassVar[bool] = False

    @property
    def drafts_with_model(self) -> bool:
        return self.name == ASSISTED

    def config(self, draft_model: str | None) -> Options:
        if self.name == LOOKUP:
            return RefereeConfig(prompt_lookup_num_tokens=10)
        return RefereeConfig(draft_model=draft_model if self.drafts_with_model else None)

    def check(self, run: RunConfig) -> None:
        """Refuse what transformers does not do in this way.

        Raises:
            UserError: in such a case.
        """
        sampling, batch_size = run.sampling, run.answers.batch_size
        if sampling.temperature:
            raise UserError(
                f"temperature: got {sampling.temperature} with {self.name}, which is greedy; leave one out"
            )
        if sampling.stop and self.name != GENERATE:
            raise UserError(
                f"stop: got {sampling.stop[0]!r} with {self.name}, which checks only the end of a step; leave "
                "one out"
            )
        if sampling.repetition_penalty != 1 and self.name == CONTINUOUS:
            raise UserError(
                f"repetition_penalty: got {sampling.repetition_penalty} with {self.name}, which has none; leave "
                "one out"
            )
        if batch_size > 1 and self.name not in BATCHES:
            raise UserError(
                f"batch_size: got {batch_size} with {self.name}, which is for one text; leave one out"
            )
        if batch_size == 1 and self.name == CONTINUOUS:
            raise UserError(f"batch_size: got 1 with {self.name}; allowed: 2 or more")
        if self.name == CONTINUOUS and not hasattr(transformers, "ContinuousBatchingConfig"):
            raise UserError(
                f"methods: got {self.name}; transformers {transformers.__version__} cannot do it; leave it out"
            )

    def circumstances(self) -> dict[str, Any]:
        """Return what the sidecar of its answers says instead."""
        return {}


REFEREES: dict[str, Referee] = {
    name: Referee(name) for name in (GENERATE, LOOKUP, ASSISTED, CONTINUOUS)
}


class _Steps:
    """A streamer that counts the tokens of every step."""

    def __init__(self) -> None:
        self._has_prompt = False
        self.lengths: list[int] = []

    def put(self, token_ids: torch.Tensor) -> None:
        if self._has_prompt:
            self.lengths.append(token_ids.numel())
        self._has_prompt = True

    def end(self) -> None:
        """Do nothing at the end of the text."""


def generate_settings(sampling: DecodingOptions, stop: StopStringCriteria | None) -> dict[str, Any]:
    """Return the arguments of `generate` for a run's options; it would make the criterion anew for every text."""
    criteria = [] if stop is None else [stop]
    return {
        "repetition_penalty": sampling.repetition_penalty,
        "stopping_criteria": StoppingCriteriaList(criteria),
    }


def room_of(target: TargetModel, num_prompt: int, max_new_tokens: int) -> int:
    """Return how many tokens may follow a prompt: ours stop at the end of the model's context, others do not."""
    limit = target.context_limit(num_prompt)
    return max_new_tokens if limit is None else min(max_new_tokens, limit - num_prompt)


class RefereeAnswerer(Answerer):
    """transformers' `generate` on the target's model, as an `Answerer`; greedy.

    The prompt's time is not measured apart. `settings` are further arguments of `generate`.
    """

    def __init__(
        self,
        target: TargetModel,
        config: RefereeConfig,
        max_new_tokens: int,
        eos_ids: frozenset[int],
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.target = target
        self._max_new_tokens, self._eos_ids = max_new_tokens, eos_ids
        self._options: dict[str, Any] = dict(settings)
        if config.prompt_lookup_num_tokens:
            self._options["prompt_lookup_num_tokens"] = config.prompt_lookup_num_tokens
        if config.draft_model:
            draft = load_draft_model(config.draft_model, "auto", target.device)
            self._options["assistant_model"] = draft.model

    @torch.inference_mode()
    def answer(self, prompt_ids: list[int]) -> Turn:
        ids = torch.tensor([prompt_ids], device=self.target.device)
        room = room_of(self.target, len(prompt_ids), self._max_new_tokens)
        self.target.synchronize()
        steps = _Steps()
        start, cpu_start = time.perf_counter(), time.process_time()
        output = self.target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=room,
            eos_token_id=sorted(self._eos_ids) or None,
            pad_token_id=min(self._eos_ids, default=0),
            streamer=steps,
            **self._options,
        )
        token_ids = output[0, len(prompt_ids) :].tolist()
        wall_time, cpu_time = time.perf_counter() - start, time.process_time() - cpu_start
        details = {"prompt_tokens": len(prompt_ids), "cpu_time": cpu_time}
        return Turn(token_ids, steps.lengths, wall_time, details)
