"""Texts from a checked model and a drafter: whole, in pieces, or many at a time.

It wraps `model.engine.loop`, takes and returns text, and keeps two things from prompt to
prompt: the method's memory and the KV cache of the last text. `model.api.decoder` makes model and drafter.

Shapes: P tokens of the prompt, n new tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
    Sized,
)
from operator import itemgetter
from typing import Any, NoReturn

import torch

from ..budget.batch import BatchBudget, batch_budget
from ..engine.drafter import Drafter
from ..engine.loop import steps_of
from ..engine.packing import why_not_packed
from ..engine.prefix_cache import PrefixCache
from ..engine.request import Request
from ..engine.rules import Processor, token_rule
from ..engine.self_test import prove_changes
from ..engine.step import StepRecord
from ..engine.support import eos_ids_of
from ..engine.target import TargetModel
from .answers import Answers, Limits, check_processors, check_prompts, with_limits
from .batch_in_turn import BatchInTurn
from .checkpoint_settings import warn_of_settings
from .foreign_arguments import OF_MANY, refuse_foreign
from .output import GenerateOutput, StreamPiece
from .prompts import Prompt, prompt_ids_of
from .stop_strings import ends_text, stop_criterion
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
        self._budget: BatchBudget | None = None  # of all batches
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
        return self._output(prompt_ids, list(running))

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

    def generate_all(
        self,
        prompts: Iterable[Prompt],
        *,
        batch_size: int = 8,
        max_new_tokens: Limits = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_strings: str | Sequence[str] = (),
        logits_processors: Sequence[Processor] = (),
        shares_memory: bool = True,
        return_exceptions: bool = False,
        show_progress: bool = False,
        **foreign: NoReturn,
    ) -> list[GenerateOutput]:
        """Answer many prompts, several in each pass of the model; arguments and errors as `answers`.

        Returns:
            The answers in the order of the prompts.
        """
        refuse_foreign(foreign, "generate_all", OF_MANY)
        found = self.answers(
            prompts,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_strings=stop_strings,
            logits_processors=logits_processors,
            shares_memory=shares_memory,
            return_exceptions=return_exceptions,
            show_progress=show_progress,
        )
        return [output for _, output in sorted(found, key=itemgetter(0))]

    def answers(
        self,
        prompts: Iterable[Prompt],
        *,
        batch_size: int = 8,
        max_new_tokens: Limits = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_strings: str | Sequence[str] = (),
        logits_processors: Sequence[Processor] = (),
        shares_memory: bool = True,
        return_exceptions: bool = False,
        show_progress: bool = False,
        **foreign: NoReturn,
    ) -> Generator[tuple[int, GenerateOutput], None, None]:
        """Return the answers to many prompts, each with its prompt's index, as they finish.

        Each text is the one of `generate`, whatever the others are; with seeds too. Arguments are checked at once.
        The first step waits for the decoder's text under way, and other texts wait while some of these are under
        way. The KV cache of the last text is neither used nor changed.

        Args:
            prompts: any iterable, also an endless one, of prompts as of `generate`. One is read when there is room
                for its text, and after the answers that have made room were taken.
            batch_size: most texts under way. A model whose texts cannot share passes decodes them in turn.
            max_new_tokens: limit, of all texts or of each.
            temperature: as of `generate`, and so are `top_k`, `top_p` and `stop_strings`.
            top_k: see there.
            top_p: see there.
            seed: of the first text; each next one has the next seed. None uses torch's global generator, in an
                order that depends on the batch.
            stop_strings: see there.
            logits_processors: as of `generate`, asked about one text at a time, [1, P]; none that keep the state
                of a text.
            shares_memory: whether the method learns from all texts for all, and keeps it. Else each text begins
                with a copy of what is known, and learns for itself. With a cold start each begins with nothing.
            return_exceptions: whether the error of a text (its prompt cannot be used, a processor failed) stands in
                the place of its answer, and the others go on. Else it is raised, which ends the iteration, as in
                `Executor.map`: answers that came before are yours, texts under way are given up.
            show_progress: whether a progress bar is written to standard error.
            foreign: none, as of `generate`.

        Raises:
            ValueError: for a value that is not allowed, at once; "prompt 3: ..." for one that cannot be used, in
                its turn.
            RuntimeError: at a step, if it is another text's turn (`model.api.turns`).
            Exception: what a processor raises, or the iterable: that when the texts under way have ended.
        """
        refuse_foreign(foreign, "answers", OF_MANY)
        check_prompts(prompts)
        check_processors(logits_processors)
        # Raises for what is not allowed.
        token_rule(self.target.device, temperature, top_k, top_p, seed, logits_processors)
        first_seed = None if seed is None else int(seed)
        stop, eos_ids = self._stop(stop_strings), self.eos_ids
        self._warn_once()

        def request_of(index: int, prompt: Prompt, limit: int) -> Request:
            own_seed = None if first_seed is None else first_seed + index
            rule = token_rule(
                self.target.device, temperature, top_k, top_p, own_seed, logits_processors
            )
            prompt_ids = prompt_ids_of(prompt, self.tokenizer)
            return Request(prompt_ids, limit, eos_ids, rule, stop).checked(self.target)

        limited = with_limits(prompts, max_new_tokens)
        batch = self.batch(batch_size, shares_memory)
        answers = Answers(batch, limited, request_of, self._output, return_exceptions)
        total = len(prompts) if isinstance(prompts, Sized) else None
        return answers.run(total=total, disable=not show_progress)

    def batch(self, size: int, shares_memory: bool = True) -> BatchInTurn:
        """Return an empty batch of texts of this decoder.

        Raises:
            ValueError: if the size is not allowed.
        """
        if size != 1 and self._budget is None and not why_not_packed(self.target):
            self._budget = batch_budget(self.drafter, self.target)
        budget = None if size == 1 else self._budget
        return BatchInTurn(self.target, self.drafter, self._turns, size, budget, shares_memory)

    def _output(self, prompt_ids: Sequence[int], steps: list[StepRecord]) -> GenerateOutput:
        """Return the whole answer that these steps make."""
        prefill_time = steps[0].prefill_ns / 1e9
        decode_time = sum(step.step_ns for step in steps) / 1e9
        token_ids = [token for step in steps for token in step.tokens]
        sequences = torch.tensor([[*prompt_ids, *token_ids]], device=self.target.device)
        text = TextStream(self.tokenizer).add(token_ids, is_last=True)
        return GenerateOutput(sequences, token_ids, text, steps, prefill_time, decode_time)

    def _begin(
        self, prompt: Prompt, max_new_tokens: int, stop_strings: str | Sequence[str], *of_rule: Any
    ) -> tuple[list[int], Iterator[StepRecord]]:
        """Return a prompt's tokens and the steps of its answer; `of_rule`: arguments of `token_rule`."""
        prompt_ids = prompt_ids_of(prompt, self.tokenizer)
        self._warn_once()
        rule, stop = token_rule(self.target.device, *of_rule), self._stop(stop_strings)
        return prompt_ids, self.steps_of(
            Request(prompt_ids, max_new_tokens, self.eos_ids, rule, stop)
        )

    def _warn_once(self) -> None:
        """Name the checkpoint's settings that texts of this decoder do without."""
        if not self._has_warned:
            self._has_warned = True
            warn_of_settings(self.target.model)

    def steps(self, prompt_ids: Sequence[int], **options: Any) -> Generator[StepRecord, None, None]:
        """Return the steps of a text, with this decoder's memory and cache; `options` are those of a `Request`.

        Errors as `steps_of`.
        """
        return self.steps_of(Request(prompt_ids, **options))

    def steps_of(self, request: Request) -> Generator[StepRecord, None, None]:
        """Return the steps of a text, with this decoder's memory and cache.

        The first step waits for the text under way. Its place is free again when the last step is
        returned, or when the iteration is closed or collected.
        A method with a cold start uses neither memory nor cache: it must read a prompt to learn from it.

        Raises:
            ValueError: as `Request.checked`; if the model was changed so that it cannot be used. At once.
            RuntimeError: at a step, if it is another text's turn (`model.api.turns`).
        """
        self.target.check_unchanged()
        prove_changes(self.target)
        request = request.checked(self.target)
        return self._in_turn(steps_of(self.target, self.drafter, request, self._prefix_cache))

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
        return ends_text(criterion, self.target.device)
