"""Texts from a checked model and a drafter: whole, or in pieces.

It wraps `model.engine.loop.decode`, takes and returns text, and keeps two things from prompt to
prompt: the method's memory and the KV cache of the last text. `model.api.decoder` makes model and drafter.

Shapes: P tokens of the prompt, n new tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any, NoReturn

import torch
from transformers import StoppingCriteriaList

from ..engine.drafter import Drafter
from ..engine.loop import decode
from ..engine.prefix_cache import PrefixCache
from ..engine.request import Request
from ..engine.rules import Processor, TokenRule, token_rule
from ..engine.self_test import prove_changes
from ..engine.step import StepRecord
from ..engine.support import eos_ids_of
from ..engine.target import TargetModel
from .checkpoint_settings import warn_of_settings
from .foreign_arguments import refuse_foreign
from .output import GenerateOutput, StreamPiece
from .prompts import Prompt, prompt_ids_of
from .stop_strings import stop_criterion
from .text_stream import TextStream
from .turns import Turns


class BaseDecoder:
    """A drafter on a checked model.

    Args:
        target: the checked model.
        drafter: a method, for this model.
        tokenizer: the model's; None if prompts are token ids and no text is wanted.
    """

    def __init__(self, target: TargetModel, drafter: Drafter, tokenizer: Any) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self._prefix_cache = PrefixCache()
        self._turns = Turns()
        self._has_warned = False

    @property
    def eos_ids(self) -> frozenset[int]:
        """The token ids that end a text: the generation config's, and the tokenizer's."""
        return eos_ids_of(self.target.model, self.tokenizer)

    def generate(
        self,
        prompt: Prompt = (),
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_strings: str | Sequence[str] = (),
        logits_processors: Sequence[Processor] = (),
        **foreign: NoReturn,
    ) -> GenerateOutput:
        """Answer a prompt.

        Args:
            prompt: text; chat messages, for the tokenizer's template; token ids as a sequence, or a
                tensor or numpy array [P] or [1, P]; or a tokenizer's output (`input_ids` and
                `attention_mask`). An empty text is the token with which the tokenizer begins every text.
            max_new_tokens: limit; exact.
            temperature: 0: greedy decoding; above 0: sampling.
            top_k: draw from the k likeliest tokens; 0: from all.
            top_p: draw from the likeliest tokens up to this total probability.
            seed: seed of the draws; None uses torch's global generator.
            stop_strings: the text ends after the token that completes one of these.
            logits_processors: functions (token ids [1, P], scores [1, V]) -> scores [1, V], such as
                transformers' `RepetitionPenaltyLogitsProcessor`, applied before temperature. In
                float32, greedy decoding may call them twice for one token (`model.engine.rules`).
            foreign: none; names of transformers' are refused with what does it here.

        Raises:
            ValueError: if a value is not allowed, or the prompt leaves no room in the context.
        """
        refuse_foreign(foreign, "generate")
        prompt_ids, running = self._begin(
            prompt, max_new_tokens, stop_strings, temperature, top_k, top_p, seed, logits_processors
        )
        steps = list(running)
        prefill_time = steps[0].prefill_ns / 1e9
        decode_time = sum(step.step_ns for step in steps) / 1e9
        token_ids = [token for step in steps for token in step.tokens]
        sequences = torch.tensor([prompt_ids + token_ids], device=self.target.device)
        text = TextStream(self.tokenizer).add(token_ids, is_last=True)
        return GenerateOutput(sequences, token_ids, text, steps, prefill_time, decode_time)

    def stream(
        self,
        prompt: Prompt = (),
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_strings: str | Sequence[str] = (),
        logits_processors: Sequence[Processor] = (),
        **foreign: NoReturn,
    ) -> Iterator[StreamPiece]:
        """Return the answer to a prompt step by step; arguments, which are checked at once, as `generate`.

        No piece ends inside a character. Leaving the iteration ends the answer; the cache still
        serves the next prompt.
        """
        refuse_foreign(foreign, "stream")
        _, steps = self._begin(
            prompt, max_new_tokens, stop_strings, temperature, top_k, top_p, seed, logits_processors
        )
        return self._pieces(steps)

    def _pieces(self, steps: Iterator[StepRecord]) -> Iterator[StreamPiece]:
        text = TextStream(self.tokenizer)
        for step in steps:
            piece = text.add(step.tokens, is_last=step.stop_reason is not None)
            yield StreamPiece(piece, step.tokens, step)

    def _begin(
        self, prompt: Prompt, max_new_tokens: int, stop_strings: str | Sequence[str], *of_rule: Any
    ) -> tuple[list[int], Iterator[StepRecord]]:
        """Return a prompt's tokens and the steps of its answer; `of_rule`: arguments of `token_rule`."""
        prompt_ids = prompt_ids_of(prompt, self.tokenizer)
        if not self._has_warned:
            self._has_warned = True
            warn_of_settings(self.target.model)
        steps = self.steps(
            prompt_ids,
            max_new_tokens=max_new_tokens,
            eos_ids=self.eos_ids,
            rule=token_rule(self.target.device, *of_rule),
            stop=self._stop(stop_strings),
        )
        return prompt_ids, steps

    def steps(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        eos_ids: Collection[int] = (),
        rule: TokenRule | None = None,
        stop: Callable[[Sequence[int]], bool] | None = None,
    ) -> Generator[StepRecord, None, None]:
        """Return the steps of `decode` (same arguments), with this decoder's memory and cache.

        The first step waits for the text under way. Its place is free again when the last step is
        returned, or when the iteration is closed or collected.
        A method with a cold start uses neither memory nor cache: it must read a prompt to learn from it.

        Raises:
            ValueError: as `decode`; if the model was changed so that it cannot be used, or a token
                is not in its vocabulary. At once.
            RuntimeError: at a step, if it is another text's turn (`model.api.turns`).
        """
        self.target.check_unchanged()
        prove_changes(self.target)
        num_tokens = self.target.num_tokens
        if outside := [token for token in prompt_ids if not 0 <= token < num_tokens]:
            raise ValueError(f"prompt: got token {outside[0]}; allowed: 0 to {num_tokens - 1}")
        Request.of(self.target, prompt_ids, max_new_tokens, eos_ids, rule, stop, overrun=0)
        running = decode(
            self.target,
            self.drafter,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            eos_ids=eos_ids,
            rule=rule,
            stop=stop,
            prefix_cache=self._prefix_cache,
        )
        return self._in_turn(running)

    def _in_turn(self, running: Iterator[StepRecord]) -> Generator[StepRecord, None, None]:
        """Yield the steps of a text when it has the turn."""
        text = self._turns.begin()
        try:
            if self.drafter.needs.cold_start:
                self.reset()
            stop_reason = None
            while stop_reason is None:
                with self._turns.stepping(text):
                    step = next(running)
                    stop_reason = step.stop_reason
                    if stop_reason is not None:
                        deque(running, maxlen=0)  # steps past the limit, which are unseen
                if stop_reason is not None:
                    self._turns.end(text)
                yield step
        finally:
            self._turns.end(text)

    def reset(self) -> None:
        """Forget what the method has learned and the last text, and free its rows."""
        with self._turns.step:
            self.drafter.reset()
            self._prefix_cache.clear()

    def _stop(self, strings: str | Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
        criterion = stop_criterion(strings, self.tokenizer, "give the tokenizer")
        if criterion is None:
            return None
        criteria = StoppingCriteriaList([criterion])
        return lambda text: bool(criteria(torch.tensor([text], device=self.target.device), None))
