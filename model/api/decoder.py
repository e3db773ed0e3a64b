"""The library: a method on a loaded model, with `generate` and `stream`.

It wraps `model.engine.loop.decode`, takes and returns text, and keeps two things from prompt to
prompt: the method's memory and the KV cache of the last text.

    from model import TokenRecycling

    decoder = TokenRecycling.from_pretrained("data/demo/model")
    print(decoder.generate("USER: Who are you? ASSISTANT:").text)

Shapes: P tokens of the prompt, n new tokens.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from ..compiled.graphs import graphed
from ..engine.drafter import Drafter
from ..engine.loop import decode
from ..engine.prefix_cache import PrefixCache
from ..engine.request import Request
from ..engine.rules import Processor, TokenRule, token_rule
from ..engine.self_test import prove, prove_changes
from ..engine.step import StepRecord
from ..engine.support import eos_ids_of
from ..engine.target import TargetModel
from ..methods.registry import MethodName, drafter_class
from ..options import chosen, unknown_name
from .checkpoint_settings import warn_of_settings
from .defaults import Choice, default_choice, paying_options
from .foreign_arguments import refuse_foreign
from .loading import base_of, check_tokenizer, load
from .output import GenerateOutput, StreamPiece
from .prompts import Prompt, prompt_ids_of
from .saved_memory import read_memory, save_memory
from .stop_strings import stop_criterion
from .text_stream import TextStream
from .turns import Turns

Decoder = TypeVar("Decoder", bound="SpeculativeDecoder")


class SpeculativeDecoder:
    """A method on a loaded model.

    There is one memory and one cache, so texts wait for each other, whatever threads they come from
    (`model.api.turns`). `session` makes a decoder for another text at the same time.

    Args:
        model: a loaded causal LM on its device(s), in eval mode, also with peft's LoRA adapters or
            compiled. Or a target that passed `model.engine.self_test`. A model is tested once. On one
            GPU its passes are replayed as CUDA graphs; `TargetModel(model)` launches each kernel by itself.
        tokenizer: its tokenizer; None if prompts are token ids and no text is wanted.
        method: a method's name, or "package.module:DrafterClass"; None: what pays on the model's device
            (`model.api.defaults`).
        options: the method's options. Of recycling:
            `output_id_topk=8, tree_version="2.2.2", start="hot", policy="average", harvest_prompt=None`;
            those of all others are listed in docs/methods.md, and are the fields of `decoder.drafter.config`.

    Attributes:
        target: the checked model.
        drafter: the method, with its memory.

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
        method: MethodName | str | None = None,
        **options: Any,
    ) -> None:
        base = model if isinstance(model, TargetModel) else base_of(model)
        check_tokenizer(tokenizer)
        method, options = self._choice(method, options, base)
        config = _config_of(method, options)
        if isinstance(base, TargetModel):
            self.target = base
        else:
            self.target = graphed(base)
            prove(self.target)
        self.tokenizer = tokenizer
        self.method = method
        self.drafter: Drafter = drafter_class(method)(
            config, self.target.vocab_size, self.target.device
        )
        self.drafter.check_target(self.target)
        self._prefix_cache = PrefixCache()
        self._turns = Turns()
        self._has_warned = False

    @classmethod
    def from_pretrained(
        cls: type[Decoder],
        path: str | Path,
        method: MethodName | str | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        **options: Any,
    ) -> Decoder:
        """Load a model and its tokenizer.

        Args:
            path: folder, GGUF file (dequantised) or hub name of a causal LM.
            method: as for the decoder.
            dtype: "auto" is the checkpoint's own. In float32 texts equal those of plain decoding exactly.
            device_map: where to put the weights (needs accelerate); None is the CPU.
            options: the method's options. Of recycling:
                `output_id_topk=8, tree_version="2.2.2", start="hot", policy="average", harvest_prompt=None`;
                those of all others are listed in docs/methods.md. All else, such as `revision`, goes to
                transformers' `from_pretrained`.

        Raises:
            ValueError: for an argument that neither takes, or a value that is not allowed; before weights load.
            UnsupportedModelError: if drafts cannot be verified exactly with this model.
            OSError: if there is no such model.
        """
        named = method or cls.own_method
        names = _option_names(named) if named else []
        of_method = {name: value for name, value in options.items() if name in names}
        of_model = {name: value for name, value in options.items() if name not in names}
        if named:
            _config_of(named, of_method)  # before the weights load
        model, tokenizer = load(path, dtype, device_map, of_model, names)
        return cls(model, tokenizer, method, **of_method)

    @classmethod
    def _choice(
        cls, method: str | None, options: dict[str, Any], model: PreTrainedModel | TargetModel
    ) -> Choice:
        """Return the method and its options, those that pay on the device where none is named."""
        if method is not None:
            return Choice(method, options)
        if cls.own_method is not None:
            return Choice(cls.own_method, paying_options(cls.own_method, options, model.device))
        if options:
            raise ValueError(
                f"options: got {', '.join(options)} without a method; allowed: with the method whose options "
                'they are, such as method="recycling"'
            )
        return default_choice(model.device)

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

    def session(self: Decoder) -> Decoder:
        """Return a decoder for another text at the same time, in milliseconds.

        It has the same model and weights, a cache of its own, and a copy of what was learned so far, from
        where it learns by itself. Steps of several sessions take turns.
        """
        config = self.drafter.config
        options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        twin = type(self)(self.target, self.tokenizer, self.method, **options)
        with self._turns.step:
            memory = self.drafter.memory()
        if memory:
            twin.drafter.load_memory(memory)
        return twin

    def __copy__(self: Decoder) -> Decoder:
        """Return a `session`. So is a deep copy: weights are not copied."""
        return self.session()

    def __deepcopy__(self: Decoder, memo: dict[int, Any]) -> Decoder:
        return self.session()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "decoder: cannot be pickled, since its kernels belong to this process; allowed: "
            "save_matrix here, and load_matrix in a new decoder there"
        )

    def reset(self) -> None:
        """Forget what the method has learned and the last text, and free its rows."""
        with self._turns.step:
            self.drafter.reset()
            self._prefix_cache.clear()

    def save_matrix(self, path: str | Path) -> None:
        """Save what the method has learned to a safetensors file.

        Raises:
            ValueError: if the method keeps nothing across prompts.
        """
        with self._turns.step:
            save_memory(self.drafter, Path(path), self.tokenizer)

    def load_matrix(self, path: str | Path) -> None:
        """Load what `save_matrix` wrote.

        Raises:
            ValueError: if it was learned with another tokenizer, or does not fit this method and its options.
        """
        with self._turns.step:
            self.drafter.load_memory(read_memory(path, self.tokenizer))

    def _stop(self, strings: str | Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
        criterion = stop_criterion(strings, self.tokenizer, "give the tokenizer")
        if criterion is None:
            return None
        criteria = StoppingCriteriaList([criterion])
        return lambda text: bool(criteria(torch.tensor([text], device=self.target.device), None))


class TokenRecycling(SpeculativeDecoder):
    """Token Recycling on a loaded model; arguments as `SpeculativeDecoder`.

    Its options, with the method's defaults:
    `output_id_topk=8, tree_version="2.2.2", start="hot", policy="average", harvest_prompt=None`

    - output_id_topk: successors kept for each token (k).
    - tree_version: "2.2.2", the paper's tree; a JSON file of rank paths; or "auto": each step the tree that
      pays most on the device. On a CPU "auto" is taken where none is given.
    - start: "hot" keeps what was learned from prompt to prompt; "cold" clears it before each.
    - policy: how rows are written: "average", "accepted-last", "accepted-only" or "original".
    - harvest_prompt: whether rows are made of the prompt's logits too; None: where that pays.

    Another method is named by `method=`; the options of all others are listed in docs/methods.md.
    """

    own_method = "recycling"


def _option_names(method: str) -> list[str]:
    return [field.name for field in dataclasses.fields(drafter_class(method).config_class)]


def _config_of(method: str, options: Mapping[str, Any]) -> Any:
    names = _option_names(method)
    for name in options:
        if name not in names:
            raise ValueError(unknown_name(f"option of {method}", name, names or ["none"]))
    return drafter_class(method).config_class(**options)
