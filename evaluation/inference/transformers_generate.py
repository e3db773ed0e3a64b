"""transformers' own ways to decode greedily, which show that the baseline is a fair one."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import transformers
from transformers import LogitsProcessorList, StoppingCriteriaList

from evaluation.answers.row import Turn
from evaluation.inference.answering import Answerer, Failure, Prompt, Result
from evaluation.inference.config import RunConfig
from evaluation.inference.plan import OtherProgram, Plan
from evaluation.questions.known import known_of
from model.backends.target import TargetModel
from model.commands.command_line import UserError
from model.methods.sps.drafter import load_draft_model
from model.options import Options, option

GENERATE, LOOKUP, ASSISTED = "generate", "generate-pld", "generate-assisted"
# With a cache of fixed size: on a GPU transformers compiles its steps at the first text.
STATIC = "generate-static"
CONTINUOUS = "generate-batch"
# Prompts given to `generate_batch` at a time, in batches: those that wait take the place of texts that end.
QUEUED_BATCHES = 4
# Tokens of a page of its cache: its default.
PAGE = 256


@dataclass(frozen=True, slots=True)
class RefereeConfig(Options):
    """Options of `generate` beyond greedy decoding."""

    prompt_lookup_num_tokens: int | None = option(None, "tokens of a prompt lookup", least=1)
    cache_implementation: str | None = option(None, "kind of cache")
    draft_model: str | None = option(None, "folder or hub name of the assistant")


@dataclass(frozen=True, slots=True)
class TransformersGenerate(OtherProgram):
    """One of transformers' ways to decode: plain, by prompt lookup, assisted by a draft model, or in batches."""

    obeys_grammars: ClassVar[bool] = True

    def config(self, draft_model: str | None) -> Options:
        if self.name == LOOKUP:
            return RefereeConfig(prompt_lookup_num_tokens=10)
        if self.name == STATIC:
            return RefereeConfig(cache_implementation="static")
        return RefereeConfig(draft_model=draft_model if self.name == ASSISTED else None)

    def check(self, run: RunConfig, config: Any) -> None:
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
        if batch_size > 1 and self.name not in (GENERATE, CONTINUOUS):
            raise UserError(
                f"batch_size: got {batch_size} with {self.name}, which is for one text; leave one out"
            )
        if batch_size == 1 and self.name == CONTINUOUS:
            raise UserError(f"batch_size: got 1 with {self.name}; allowed: 2 or more")
        if self.name == CONTINUOUS and not hasattr(transformers, "ContinuousBatchingConfig"):
            raise UserError(
                f"methods: got {self.name}; transformers {transformers.__version__} cannot do it; leave it out"
            )

    def answerer(self, plan: Plan, target: TargetModel | None) -> Answerer:
        assert target is not None, "it decodes with the model"
        if plan.run.answers.batch_size == 1:
            return RefereeAnswerer(plan, target)
        batches = {GENERATE: PaddedBatch, CONTINUOUS: ContinuousBatch}
        return batches[self.name](plan, target)


TRANSFORMERS: dict[str, OtherProgram] = {
    name: TransformersGenerate(name) for name in (GENERATE, LOOKUP, ASSISTED, STATIC, CONTINUOUS)
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


def room_of(target: TargetModel, num_prompt: int, max_new_tokens: int) -> int:
    """Return how many tokens may follow a prompt; an exception if there is room for none.

    Ours stop at the end of the model's context, others do not.
    """
    limit = target.context_limit()
    if limit is not None and num_prompt >= limit:
        raise ValueError(
            f"prompt: got {num_prompt} tokens; allowed: fewer than the model's context of {limit}"
        )
    return max_new_tokens if limit is None else min(max_new_tokens, limit - num_prompt)


class RefereeAnswerer(Answerer):
    """transformers' `generate` on the target's model, a text at a time. The prompt's time is not measured apart."""

    def __init__(self, plan: Plan, target: TargetModel) -> None:
        config, sampling = plan.participant.config, plan.run.sampling
        self.target, self._tokenizer = target, plan.model.tokenizer
        self._max_new_tokens, self._eos_ids = sampling.max_new_tokens, plan.eos_ids(target)
        stop = plan.stop_criterion()  # `generate` would make it anew for every text
        self._criteria = StoppingCriteriaList([] if stop is None else [stop])
        self._options: dict[str, Any] = {
            "do_sample": False,
            "repetition_penalty": sampling.repetition_penalty,
            "stopping_criteria": self._criteria,
            "eos_token_id": sorted(self._eos_ids) or None,
            "pad_token_id": min(self._eos_ids, default=0),
        }
        if config.prompt_lookup_num_tokens:
            self._options["prompt_lookup_num_tokens"] = config.prompt_lookup_num_tokens
        if config.cache_implementation:
            self._options["cache_implementation"] = config.cache_implementation
        if config.draft_model:
            draft = load_draft_model(config.draft_model, "auto", target.device)
            self._options["assistant_model"] = draft.model

    @torch.inference_mode()
    def answer(self, prompt: Prompt) -> Turn:
        prompt_ids = prompt.token_ids
        ids = torch.tensor([prompt_ids], device=self.target.device)
        room = room_of(self.target, len(prompt_ids), self._max_new_tokens)
        known = (prompt.question, prompt.turn, prompt_ids, self._tokenizer)
        grammar = known_of(*known, self.target.vocab_size, self._eos_ids).grammar
        self.target.synchronize()
        steps = _Steps()
        start, cpu_start = time.perf_counter(), time.process_time()
        output = self.target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=room,
            streamer=steps,
            logits_processor=LogitsProcessorList([grammar] if grammar else []),
            **self._options,
        )
        token_ids = output[0, len(prompt_ids) :].tolist()
        wall_time, cpu_time = time.perf_counter() - start, time.process_time() - cpu_start
        details = {"prompt_tokens": len(prompt_ids), "cpu_time": cpu_time}
        return Turn(token_ids, steps.lengths, wall_time, details)


class _RefereeBatch(RefereeAnswerer):
    """Prompts that are answered together once all are asked."""

    num_waiting = 1  # prompts asked together, for each one that shares a pass

    def __init__(self, plan: Plan, target: TargetModel) -> None:
        super().__init__(plan, target)
        self._num_shared = plan.run.answers.batch_size
        self.size = self.num_waiting * self._num_shared

    def ask(self, slot: int, prompt: Prompt) -> None:
        self._room(prompt.token_ids)

    def ended(self, under_way: Mapping[int, Prompt]) -> Sequence[tuple[int, Result]]:
        low_memory = {slot: prompt for slot, prompt in under_way.items() if prompt.is_low_memory}
        if low_memory:
            return super().ended(low_memory)
        answers: Sequence[Result]
        try:
            answers = self._answers([prompt.token_ids for prompt in under_way.values()])
        except Exception as error:
            answers = [Failure.of(error)] * len(under_way)
        return list(zip(under_way, answers, strict=True))

    def _answers(self, prompts: Sequence[list[int]]) -> list[Turn]:
        """Return the answer to each prompt."""
        raise NotImplementedError

    def _room(self, prompt_ids: Sequence[int]) -> int:
        """Return the most new tokens; an exception if there is room for none."""
        return room_of(self.target, len(prompt_ids), self._max_new_tokens)

    def _turn(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        wall_time: float,
        **seconds: float,
    ) -> Turn:
        """Return an answer, cut at its own end of text and limit."""
        token_ids = token_ids[: self._room(prompt_ids)]

        def is_stopped(text: list[int]) -> bool:
            return bool(self._criteria) and bool(self._criteria(torch.tensor([text]), None))

        ends = (
            place
            for place, token in enumerate(token_ids, 1)
            if token in self._eos_ids or is_stopped([*prompt_ids, *token_ids[:place]])
        )
        token_ids = list(token_ids[: next(ends, len(token_ids))])
        details = {"prompt_tokens": len(prompt_ids), **seconds}
        return Turn(token_ids, [1] * len(token_ids), wall_time, details)


class PaddedBatch(_RefereeBatch):
    """`generate` on a batch that is padded on the left: all texts wait for the longest."""

    @torch.inference_mode()
    def _answers(self, prompts: Sequence[list[int]]) -> list[Turn]:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        # With a token of its own: a repetition penalty counts hidden tokens too.
        ids = [prompt[:1] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * count + [1] * (longest - count) for count in padding]
        self.target.synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        output = self.target.model.generate(
            torch.tensor(ids, device=self.target.device),
            attention_mask=torch.tensor(mask, device=self.target.device),
            max_new_tokens=max(map(self._room, prompts)),
            **self._options,
        )
        found = output[:, longest:].tolist()
        wall_time, cpu_time = time.perf_counter() - start, time.process_time() - cpu_start
        shares = {"share_time": wall_time / len(prompts), "cpu_time": cpu_time / len(prompts)}
        return [
            self._turn(prompt, token_ids, wall_time, **shares)
            for prompt, token_ids in zip(prompts, found, strict=True)
        ]


class ContinuousBatch(_RefereeBatch):
    """`generate_batch`, transformers' continuous batching, of more prompts than share a pass.

    Time is counted from the first text's begin on: what transformers does before and after is left out.
    """

    num_waiting = QUEUED_BATCHES

    def _answers(self, prompts: Sequence[list[int]]) -> list[Turn]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        longest, most = max(map(len, prompts)), max(map(self._room, prompts))
        # As large as the texts need, not as the device's memory is: other participants need some of it.
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
        outputs = self.target.model.generate_batch(
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
