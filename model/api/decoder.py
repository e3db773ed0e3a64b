"""The library: a method on a loaded model, which makes texts whole, in pieces, or many at a time.

It wraps the loop (`model.engine.loop`) and its batches, takes and returns text, and keeps two things from prompt to
prompt: the method's memory and the KV cache of the last text.

    from model import SpeculativeDecoder

    decoder = SpeculativeDecoder.from_pretrained("data/demo/model")
    print(decoder.generate("USER: Who are you? ASSISTANT:").text)

Shapes: P tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from transformers import PreTrainedModel

from ..backends.graphs.graphed_target import graphed
from ..backends.proofs.self_test import prove
from ..backends.proofs.support import eos_ids_of
from ..backends.target import TargetModel
from ..budget import memory
from ..engine.rules import Processor, token_rule
from ..engine.sequence import Request
from ..engine.step import StepRecord
from ..methods import CustomMethod, MethodName, drafter_class
from ..options import chosen
from .answers import (
    Asked,
    Limits,
    answers_of,
    check_processors,
    check_prompts,
    named_error,
    read_prompts,
)
from .defaults import choice_of, config_of, named_method, option_names
from .generate_arguments import refuse_foreign, warn_of_settings
from .loading.models import base_of, check_tokenizer, load
from .output import GenerateOutput, StreamPiece, TextStream
from .permits import SequenceQueue
from .prompts import Prompt, ends_text, prompt_ids_of, stop_criterion

Decoder = TypeVar("Decoder", bound="SpeculativeDecoder")


class SpeculativeDecoder:
    """A method on a loaded model.

    There is one memory and one cache, so texts wait for each other, whatever threads they come from
    (`model.api.permits`). `session` makes a decoder for another text at the same time.

    Args:
        model: a loaded causal LM on its device(s), in eval mode, also with peft's LoRA adapters or
            compiled. Or a target that passed `model.backends.proofs.self_test`. A model is tested once. On one
            GPU its passes are replayed as CUDA graphs; `TargetModel(model)` launches each kernel by itself.
        tokenizer: its tokenizer; None if prompts are token ids and no text is wanted.
        method: a method's name, or `CustomMethod("package.module:DrafterClass")`; None: what pays on the model's
            device (`model.api.defaults`).
        options: the method's options. Of recycling:
            `output_id_topk=8, tree_version="2.2.2", start="hot", policy="average", harvest_prompt=None`;
            those of all others are listed in docs/methods.md, and are the fields of `decoder.drafter.config`.

    Attributes:
        target: the checked model.
        drafter: the method, with its memory.
        texts: decodes token ids.

    Raises:
        ValueError: for an unknown method or option, or a value that is not allowed.
        UnsupportedModelError: if drafts cannot be verified exactly with this model.
    """

    # The method where none is named; None: what pays on the device.
    own_method: ClassVar[str | None] = None

    def __init__(
        self,
        model: PreTrainedModel | TargetModel,
        tokenizer: Any = None,
        method: MethodName | CustomMethod | None = None,
        **options: Any,
    ) -> None:
        base = model if isinstance(model, TargetModel) else base_of(model)
        check_tokenizer(tokenizer)
        name, options, _ = choice_of(method, self.own_method, options, base.device)
        config = config_of(name, options)
        if isinstance(base, TargetModel):
            target = base
        else:
            target = graphed(base)
            prove(target)
        drafter = drafter_class(name)(config, target.vocab_size, target.device)
        drafter.check_target(target)
        self.target, self.drafter, self.tokenizer, self.method = target, drafter, tokenizer, name
        self.queue = SequenceQueue(target, drafter)
        self._has_warned = False

    @classmethod
    def from_pretrained(
        cls: type[Decoder],
        path: str | Path,
        method: MethodName | CustomMethod | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        weights: str = "auto",
        **options: Any,
    ) -> Decoder:
        """Load a model and its tokenizer.

        Args:
            path: folder, GGUF file or hub name of a causal LM.
            method: as for the decoder.
            dtype: "auto" is the checkpoint's own. In float32 texts equal those of plain decoding exactly.
            device_map: where to put the weights (needs accelerate); None is the CPU.
            weights: of a GGUF file: "native" keeps them in their bits, "dequantised" unpacks them; "auto" is native
                on the CPU, for the types that the kernel knows.
            options: the method's options. Of recycling:
                `output_id_topk=8, tree_version="2.2.2", start="hot", policy="average", harvest_prompt=None`;
                those of all others are listed in docs/methods.md. All else, such as `revision`, goes to
                transformers' `from_pretrained`.

        Raises:
            ValueError: for an argument that neither takes, or a value that is not allowed; before weights load.
            UnsupportedModelError: if drafts cannot be verified exactly with this model.
            OSError: if there is no such model.
        """
        named = named_method(method, cls.own_method)
        names = option_names(named) if named else []
        of_method = {name: value for name, value in options.items() if name in names}
        of_model = {name: value for name, value in options.items() if name not in names}
        if named:
            config_of(named, of_method)  # before the weights load
        model, tokenizer = load(path, dtype, device_map, of_model, names, weights)
        return cls(model, tokenizer, method, **of_method)

    def __repr__(self) -> str:
        """Return the model, the method with the options that are not its defaults, device and dtype."""
        model, config = self.target.model, self.drafter.config
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        options = "".join(f", {key}={value!r}" for key, value in chosen(config).items())
        where = f"device='{self.target.device}', dtype={self.target.dtype}"
        return f"{type(self).__name__}({name!r}, method={self.method!r}{options}, {where})"

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
        refuse_foreign(foreign, self.generate)
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
        refuse_foreign(foreign, self.stream)
        _, running = self._begin(
            prompt, max_new_tokens, stop_strings, temperature, top_k, top_p, seed, logits_processors
        )
        return TextStream(self.tokenizer).pieces(running)

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
        """Answer many prompts, several in each pass of the model; arguments and errors as `as_completed`.

        All prompts are read, and checked, before the first token. What ends the call later, such as a processor's
        error or Ctrl-C, has the answers that were done in its attribute `answers`, by their prompts' indices.

        Returns:
            The answers in the order of the prompts.
        """
        refuse_foreign(foreign, self.generate_all)
        check_prompts(prompts)
        answers = self.as_completed(
            prompts if isinstance(prompts, Sized) else list(prompts),
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
        found: dict[int, GenerateOutput] = {}
        try:
            for index, output in answers:
                found[index] = output
        except BaseException as error:
            vars(error)["answers"] = found
            raise
        return [found[index] for index in sorted(found)]

    def as_completed(
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

        Arguments are those of `generate`, but for these:

        - prompts: any iterable. Of what has a length, such as a list, every prompt is checked before the first
          token. Any other may be endless: one is read when there is room for its text, and after the answers that
          have made room were taken.
        - batch_size: most texts under way. A model whose texts cannot share passes decodes them in turn.
        - max_new_tokens: limit, of all texts or of each.
        - seed: of the first text; each next one has the next seed. None uses torch's global generator, in an
          order that depends on the batch.
        - logits_processors: asked about one text at a time, [1, P]; none that keep the state of a text.
        - shares_memory: whether the method learns from all texts for all, and keeps it. Else each text begins
          with a copy of what is known, and learns for itself. With a cold start each begins with nothing.
        - return_exceptions: whether the error of a text (its prompt cannot be used, a processor failed) stands in
          the place of its answer, and the others go on. Else it is raised, which ends the iteration, as in
          `Executor.map`: answers that came before are yours, texts under way are given up.
        - show_progress: whether a progress bar is written to standard error.

        Raises:
            ValueError: for a value that is not allowed, at once; "prompt 3: ..." for one that cannot be used: of a
                list at once, else in its turn.
            RuntimeError: at a step, if another text has the permit (`model.api.permits`).
            Exception: what a processor raises, or the iterable: that when the texts under way have ended.
        """
        refuse_foreign(foreign, self.as_completed)
        check_prompts(prompts)
        check_processors(logits_processors)
        device, of_rule = self.target.device, (temperature, top_k, top_p)
        # Raises for what is not allowed.
        token_rule(device, *of_rule, seed, logits_processors)
        stop, eos_ids = self._stop(stop_strings), self.eos_ids
        self._warn_once()

        def read(index: int, prompt: Prompt, limit: int) -> Asked:
            try:
                prompt_ids = prompt_ids_of(prompt, self.tokenizer)
                Request(prompt_ids, limit).checked(self.target)
                return prompt_ids, limit
            except Exception as error:  # a tokenizer may raise anything
                return named_error(index, error), limit

        def request_of(index: int, prompt_ids: Sequence[int], limit: int) -> Request:
            self.queue.check_model()
            own_seed = None if seed is None else int(seed) + index
            rule = token_rule(device, *of_rule, own_seed, logits_processors)
            return Request(prompt_ids, limit, eos_ids, rule, stop)

        asked = read_prompts(prompts, max_new_tokens, read, return_exceptions)
        batch = self.queue.batch(batch_size, shares_memory)
        total = len(prompts) if isinstance(prompts, Sized) else None
        bar = {"total": total, "disable": not show_progress}
        return answers_of(batch, asked, request_of, self._output, return_exceptions, **bar)

    def steps(self, prompt_ids: Sequence[int], **options: Any) -> Generator[StepRecord, None, None]:
        """Return the steps of a text; `options` are those of a `Request`, all else as `SequenceQueue.steps_of`."""
        return self.queue.steps_of(Request(prompt_ids, **options))

    def reset(self) -> None:
        """Forget what the method has learned and the last text, and free its rows."""
        self.queue.reset()

    def _begin(
        self, prompt: Prompt, max_new_tokens: int, stop_strings: str | Sequence[str], *of_rule: Any
    ) -> tuple[list[int], Iterator[StepRecord]]:
        """Return a prompt's tokens and the steps of its answer; `of_rule`: arguments of `token_rule`."""
        prompt_ids = prompt_ids_of(prompt, self.tokenizer)
        self._warn_once()
        rule, stop = token_rule(self.target.device, *of_rule), self._stop(stop_strings)
        request = Request(prompt_ids, max_new_tokens, self.eos_ids, rule, stop)
        return prompt_ids, self.queue.steps_of(request)

    def _output(self, prompt_ids: Sequence[int], steps: Sequence[StepRecord]) -> GenerateOutput:
        """Return the whole answer that these steps make."""
        prefill_time = steps[0].prefill_ns / 1e9
        decode_time = sum(step.step_ns for step in steps) / 1e9
        token_ids = [token for step in steps for token in step.tokens]
        sequences = torch.tensor([[*prompt_ids, *token_ids]], device=self.target.device)
        text = TextStream(self.tokenizer).add(token_ids, is_last=True)
        return GenerateOutput(sequences, token_ids, text, list(steps), prefill_time, decode_time)

    def _stop(self, strings: str | Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
        criterion = stop_criterion(strings, self.tokenizer, "give the tokenizer")
        return ends_text(criterion, self.target.device)

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_of_settings(self.target.model)

    def session(self: Decoder) -> Decoder:
        """Return a decoder for another text at the same time, in milliseconds.

        It has the same model and weights, a cache of its own, and a copy of what was learned so far, from
        where it learns by itself. Steps of several sessions take turns.
        """
        options = dataclasses.asdict(self.drafter.config)
        twin = type(self)(self.target, self.tokenizer, CustomMethod(self.method), **options)
        with self.queue.permits.memory():
            learned = self.drafter.memory()
        if learned:
            twin.drafter.load_memory(learned)
        return twin

    # Of any copy: weights are not copied.
    __copy__ = session

    def __deepcopy__(self: Decoder, memo: dict[int, Any]) -> Decoder:
        return self.session()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "decoder: cannot be pickled, since its kernels belong to this process; allowed: "
            "save_memory here, and load_memory in a new decoder there"
        )

    def save_memory(self, path: str | Path) -> None:
        """Save what the method has learned to a safetensors file.

        Raises:
            ValueError: if the method keeps nothing across prompts.
        """
        with self.queue.permits.memory():
            memory.save_memory(self.drafter, Path(path), self.tokenizer)

    def load_memory(self, path: str | Path) -> None:
        """Load what `save_memory` wrote.

        Raises:
            ValueError: if it was learned with another tokenizer, or does not fit this method and its options.
        """
        with self.queue.permits.memory():
            self.drafter.load_memory(memory.read_memory(path, self.tokenizer))


class TokenRecycling(SpeculativeDecoder):
    """Token Recycling on a loaded model; arguments as `SpeculativeDecoder`, which has all other methods.

    Its options, with the method's defaults:
    `output_id_topk=8, tree_version="2.2.2", start="hot", policy="average", harvest_prompt=None`

    - output_id_topk: successors kept for each token (k).
    - tree_version: "2.2.2", the paper's tree; a JSON file of rank paths; or "auto": each step the tree that
      pays most on the device. On a CPU "auto" is taken where none is given.
    - start: "hot" keeps what was learned from prompt to prompt; "cold" clears it before each.
    - policy: how rows are written: "average", "accepted-last", "accepted-only" or "original".
    - harvest_prompt: whether rows are made of the prompt's logits too; None: where that pays.
    """

    own_method = "recycling"
