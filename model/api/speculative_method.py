"""A method that decodes calls of a model's `generate`: what `accelerate` and the callables stand on.

Transformers prepares processors, criteria and lengths, and the method decodes with them.

Shapes: B prompts, P tokens of each, padding included, n new tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import get_ident
from types import MethodType
from typing import Any, TypeAlias

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from ..backends.passes.loaded_model import lock_of
from ..backends.proofs.packing import why_not_packed
from ..backends.proofs.support import refuse_unverifiable
from ..backends.target import TargetModel
from ..engine.sequence import Request
from ..engine.step import StepRecord
from ..machine.locks import SharedLock
from ..methods import CustomMethod, MethodName
from .decoder import SpeculativeDecoder
from .generate_arguments import BEFOREHAND, BY_NAME, UnsupportedCallError, check, refusal
from .loading.models import check_tokenizer
from .permits import WITHIN
from .prepared_call import PreparedCall
from .prompts import stop_criterion

logger = logging.getLogger(__name__)

Generated: TypeAlias = torch.Tensor | GenerateDecoderOnlyOutput
# Transformers keeps them from callables.
KEPT = ("assistant_model", "synced_gpus")


class SpeculativeMethod:
    """A method that decodes the calls of one model's `generate`; it keeps memory and cache from call to call.

    Args:
        method: a method's name, or `CustomMethod("package.module:DrafterClass")`; None: what pays on the model's
            device.
        tokenizer: for `stop_strings`.
        options: the method's options.
    """

    decoder_class: type[SpeculativeDecoder] = SpeculativeDecoder

    def __init__(
        self, method: MethodName | CustomMethod | None = None, tokenizer: Any = None, **options: Any
    ) -> None:
        check_tokenizer(tokenizer)
        self.method = method
        self.tokenizer = tokenizer
        self.options = options
        # Of the call that ended last; of several prompts one text after the other.
        self.steps: list[StepRecord] = []
        self.decoder: SpeculativeDecoder | None = None  # from the first call on
        self._saved: Path | None = None  # loaded when there is a decoder
        self._lock = SharedLock()  # of making the decoder
        self._callers: set[int] = set()  # threads that are within a call

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without memory: a copy, such as one made with its model, belongs to another model."""
        return partial(type(self), **self.options), (self.method, self.tokenizer)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        method, state = self.method or self.decoder_class.own_method, "no call yet"
        if self.decoder is not None:
            method = self.decoder.method
            state = f"on a {type(self.decoder.target.model).__name__}"
        return f"<speculative({method!r}{options}), {state}>"

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens emitted by each of these steps, bonus token included."""
        return [len(step.tokens) for step in self.steps]

    def save_memory(self, path: str | Path) -> None:
        """Save what the method has learned to a safetensors file; ValueError if that is nothing."""
        if self.decoder is None:
            raise ValueError(
                "save_memory: got no call yet, so nothing was learned; allowed: after the first call"
            )
        self.decoder.save_memory(path)

    def load_memory(self, path: str | Path) -> None:
        """Load what `save_memory` wrote; before the first call the file is read, or refused, when that begins."""
        with self._lock:
            if self.decoder is not None:
                self.decoder.load_memory(path)
            elif not Path(path).is_file():
                raise FileNotFoundError(
                    f"load_memory: got {path}, which is not a file; allowed: a file that save_memory wrote"
                )
            else:
                self._saved = Path(path)

    def reset(self) -> None:
        """Forget what the method has learned and the last text, and free its rows."""
        self._saved = None
        if self.decoder is not None:
            self.decoder.reset()

    def prepare(self, model: PreTrainedModel) -> SpeculativeDecoder:
        """Return the decoder, which is made and tested once, and anew for a model that was moved or cast.

        Raises:
            ValueError: if the model or an option is not allowed, or another model was used before.
            UnsupportedCallError: if the model cannot be used any more, such as in training mode.
        """
        made = partial(self.decoder_class, model, self.tokenizer, self.method, **self.options)
        with self._lock:
            if self.decoder is None:
                decoder = made()
                if self._saved is not None:
                    decoder.load_memory(self._saved)
                self._saved, self.decoder = None, decoder
            if self.decoder.target.model is not model:
                raise ValueError(
                    "custom_generate: got another model than at its first call, whose tokens it has "
                    "learned; make one for each model"
                )
            try:
                self.decoder.target.check_model()
            except ValueError:
                try:
                    self.decoder = made()
                except ValueError as error:
                    raise UnsupportedCallError("model", str(error)) from error
                logger.warning(
                    "%s: the model was moved, cast or resized; what the method had learned is forgotten",
                    self.decoder.method,
                )
            return self.decoder

    def generate(
        self,
        generate: Callable[..., Any],
        model: PreTrainedModel,
        given: Mapping[str, Any],
        may_leave: bool = False,
    ) -> Any:
        """Let transformers prepare a call, and decode it.

        Args:
            generate: of the model's class.
            model: the model.
            given: the call's arguments, by name. A `step_streamer` gets the tokens of each step together.
            may_leave: whether the call can be left to transformers. Then more than the model's context is refused,
                where a text would end, and several prompts, if they would have to be decoded in turn.

        Raises:
            UnsupportedCallError: before the first token, if it cannot be decoded with drafts.
            ValueError: as transformers' own, and for a model or an option that is not allowed.
        """
        if given.get("streamer") is not None and given.get("step_streamer") is not None:
            raise ValueError("streamer, step_streamer: got both; allowed: one of them")
        if get_ident() in self._callers or lock_of(model).is_mine:
            raise UnsupportedCallError("calls", WITHIN)
        for name in BEFOREHAND:
            if (value := _setting(model, given, name)) in (True, "paged"):
                origin = " (from the generation_config, not from the call itself)"
                shown = "" if name in given else origin
                raise refusal(name, value, BY_NAME[name].allowed, shown)
        words = _with_stop_criterion(model, given, self.tokenizer)
        for name in ("streamer", "step_streamer", "tokenizer", "custom_generate"):
            words.pop(name, None)
        is_reached = False

        def prepared(*args: Any, **kwargs: Any) -> Generated:
            nonlocal is_reached
            is_reached = True
            return self.decode(given, may_leave, *args, **kwargs)

        self._callers.add(get_ident())
        try:
            result = generate(model, **words, custom_generate=prepared)
        finally:
            self._callers.discard(get_ident())
        if not is_reached:
            raise UnsupportedCallError(
                "generate",
                f"generate: got a generate of {type(model).__name__}'s own, which does not call "
                "custom_generate; allowed: the generate of transformers",
            )
        return result

    def decode(
        self,
        given: Mapping[str, Any],
        may_leave: bool,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Generated:
        """Decode what transformers has prepared: arguments as of `generate`, then those of a callable.

        Returns:
            int64 [B, P + n], texts that are shorter than others padded on the right. With
            `return_dict_in_generate` an output that holds it and, if asked for, n scores and logits, each float32
            [1, V]. Its cache is None: the rows stay here.
        """
        if model.config.is_encoder_decoder:  # before its arguments, which are others
            refuse_unverifiable(model)
        _drop_unfilled_cache(model)
        _check_inputs(model)
        by_step, by_token = given.get("step_streamer"), given.get("streamer")
        others = {name: given.get(name) for name in KEPT}
        call = PreparedCall(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs | others | {"streamer": by_token if by_step is None else by_step},
            frozenset(given),
        )
        check(call)
        decoder = self.prepare(model)
        requests = call.requests()
        if may_leave:
            _leave(decoder.target, call, requests)
        if call.num_prompts > 1:
            rows = decoder.queue.steps_of_all(requests)
        else:
            rows = [_decode_one(decoder, requests[0], input_ids, by_token, by_step)]
        self.steps = [step for steps in rows for step in steps]
        answers = [[token for step in steps for token in step.tokens] for steps in rows]
        return call.output(answers)


@contextmanager
def ended_on_error(given: Mapping[str, Any]) -> Iterator[None]:
    """End a call's streamer when an error leaves, as whoever reads it in another thread would wait for ever."""
    try:
        yield
    except BaseException:
        for streamer in (given.get("streamer"), given.get("step_streamer")):
            if streamer is not None:
                with suppress(Exception):  # the first error is the one to be seen
                    streamer.end()
        raise


def _with_stop_criterion(
    model: PreTrainedModel, given: Mapping[str, Any], tokenizer: Any
) -> dict[str, Any]:
    """Return a call's arguments with the criterion in place of `stop_strings`: it needs the tokenizer, which
    transformers keeps from callables.
    """
    words = dict(given)
    strings: str | Sequence[str] | None = _setting(model, given, "stop_strings")
    if not strings and strings != "":  # an empty text is refused below
        return words
    words["stop_strings"] = None  # also those of a generation config
    tokenizer = tokenizer if given.get("tokenizer") is None else given["tokenizer"]
    criterion = stop_criterion(
        strings, tokenizer, "give tokenizer= to accelerate, to the callable or to generate"
    )
    criteria = given.get("stopping_criteria") or []
    if not any(type(one) is StopStringCriteria for one in criteria):  # as in transformers
        words["stopping_criteria"] = StoppingCriteriaList([*criteria, criterion])
    return words


def _setting(model: PreTrainedModel, given: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a call: its own, else its generation config's, else the model's."""
    if name in given:
        return given[name]
    configs = (given.get("generation_config"), model.generation_config)
    return next(filter(None, (getattr(config, name, None) for config in configs)), None)


def _drop_unfilled_cache(model: PreTrainedModel) -> None:
    """Drop the static cache that transformers 4 made, which no pass fills: the next call would fail on it."""
    layers = getattr(model.__dict__.get("_cache"), "layers", ())
    if not all(getattr(layer, "is_initialized", True) for layer in layers):
        del model._cache


def _check_inputs(model: PreTrainedModel) -> None:
    """Refuse a model whose function that prepares inputs was patched, as by peft; its class's is proved."""
    prepare = type(model).prepare_inputs_for_generation
    if model.prepare_inputs_for_generation != MethodType(prepare, model):
        raise UnsupportedCallError(
            "model",
            "model: its prepare_inputs_for_generation was replaced, as for a learned prompt; allowed: the "
            "model's own; adapters in the layers, such as LoRA, are fine",
        )


def _leave(target: TargetModel, call: PreparedCall, requests: Sequence[Request]) -> None:
    """Refuse a call with which transformers does more: texts that outgrow the model's context, which would end
    there, and several prompts whose texts would be decoded in turn.
    """
    for request in requests:
        num_tokens = len(request.prompt_ids)
        limit, context = num_tokens + request.max_new_tokens, target.context_limit()
        if context is not None and limit > context:
            got, allowed = f"{limit} tokens, prompt included", f"the model's context of {context}"
            raise refusal("max_length", got, allowed)
    if call.num_prompts > 1 and (why := why_not_packed(target)):
        raise refusal("input_ids", call.input_ids, f"one prompt with this model: {why}")


def _decode_one(
    decoder: SpeculativeDecoder,
    request: Request,
    input_ids: torch.Tensor,
    by_token: BaseStreamer | None,
    by_step: BaseStreamer | None,
) -> list[StepRecord]:
    """Decode a text, hand the prompt [1, P] and new tokens to its streamer, if any, and return its steps."""
    steps, streamer = [], by_token if by_step is None else by_step
    # An error below would leave the decoder with an open text.
    with closing(decoder.queue.steps_of(request)) as running:
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for step in running:
            steps.append(step)
            if streamer is not None:
                parts = [[token] for token in step.tokens] if by_step is None else [step.tokens]
                for part in parts:
                    streamer.put(torch.tensor(part, device="cpu"))
    if streamer is not None:
        streamer.end()
    return steps
