"""`model.generate(**inputs, custom_generate=recycling(), ...)`: speculative decoding inside
transformers' own generation.

Transformers prepares processors, stopping criteria and lengths, and the callable decodes with them.
`generate_arguments.py` lists what each argument does; what cannot be honoured is refused. Transformers
keeps `tokenizer` from callables: give it to `recycling(tokenizer)` if there are `stop_strings`, or use
`accelerate`, which needs no argument in the calls.

    from model.api.custom_generate import recycling

    decode = recycling()
    model.generate(**inputs, custom_generate=decode, max_new_tokens=100)

Shapes: B prompts, P tokens of each, padding included, n new tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from ..engine.request import Request
from ..engine.step import StepRecord
from ..engine.support import refuse_unverifiable
from .decoder import SpeculativeDecoder, TokenRecycling
from .generate_arguments import UnsupportedCallError, check
from .left_calls import refuse_in_turn, refuse_past_context
from .loading import check_tokenizer
from .prepared import Record, padding_token, row_requests
from .prepared_call import PreparedCall
from .rows import with_answers
from .stop_strings import stop_criterion
from .streamers import Streamer, TokenStream, ended_on_error

logger = logging.getLogger(__name__)

# Its frame holds arguments that never reach a callable.
GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


class Caller(NamedTuple):
    """What `generate` has when it calls a callable, and does not pass on.

    Attributes:
        streamer: it got the prompt already, and waits for tokens and for the end.
        arguments: others that would be ignored, by name.
        given: the names of the call's own arguments.
    """

    streamer: Streamer | None
    arguments: dict[str, Any]
    given: frozenset[str]


def caller_of(model: PreTrainedModel) -> Caller:
    """Return what the `generate` of a model that is calling holds; nothing if none is.

    Transformers drops `streamer` for callables, after it has put the prompt, so that whoever reads it
    would wait for ever; `assistant_model` and `synced_gpus` would be ignored silently. No argument of a
    callable tells of them, so that `generate`'s frame is read.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is GENERATE and frame.f_locals["self"] is model:
            held = frame.f_locals
            arguments = {name: held[name] for name in ("assistant_model", "synced_gpus")}
            return Caller(held["streamer"], arguments, frozenset(held["kwargs"]))
        frame = frame.f_back
    return Caller(None, {}, frozenset())


class Speculative:
    """A callable for `generate(custom_generate=...)`; it keeps memory and cache from call to call.

    Args:
        method: a method's name, or "package.module:DrafterClass"; None: what pays on the model's device.
        tokenizer: for `stop_strings`.
        options: the method's options.

    Attributes:
        decoder_class: of the decoder.
        steps: records of the steps of the call that ended last; of several prompts one text after the other.
        decoder: the decoder, from the first call on.

    Raises:
        ValueError: for a tokenizer that is none.
    """

    decoder_class: type[SpeculativeDecoder] = SpeculativeDecoder

    def __init__(self, method: str | None = None, tokenizer: Any = None, **options: Any) -> None:
        check_tokenizer(tokenizer)
        self.method = method
        self.tokenizer = tokenizer
        self.options = options
        self.steps: list[StepRecord] = []
        self.decoder: SpeculativeDecoder | None = None
        self._saved: Path | None = None  # loaded when there is a decoder
        self._lock = threading.Lock()  # of making the decoder

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without memory: a copy, such as one made with its model, belongs to another model."""
        return partial(type(self), **self.options), (self.method, self.tokenizer)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        state = "no call yet" if self.decoder is None else f"on a {self._name_of_model()}"
        named = self.method or self.decoder_class.own_method
        method = named if self.decoder is None else self.decoder.method
        return f"<speculative({method!r}{options}), {state}>"

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens emitted by each of these steps, bonus token included."""
        return [len(step.tokens) for step in self.steps]

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | Sequence[str] | None = None,
        step_streamer: Streamer | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode; called by `generate`.

        Args:
            model: the model whose `generate` calls.
            input_ids: int64 [B, P]; several prompts are decoded as a batch.
            logits_processor: prepared by transformers, as are the next two.
            stopping_criteria: lengths and ends of text among them.
            generation_config: all other settings.
            stop_strings: the text ends after the token that completes one of these.
            step_streamer: gets the prompt, then every step's tokens (a `TextStreamer`, for one). A
                `streamer` of the call gets token by token.
            model_kwargs: all other arguments of `generate`.

        Returns:
            int64 [B, P + n], texts that are shorter than others padded on the right. With
            `return_dict_in_generate` an output that holds it and, if asked for, n scores and logits, each float32
            [1, V]. Its cache is None: the rows stay here.

        Raises:
            UnsupportedCallError: for anything that is not supported.
            ValueError: if the model cannot be used, or an option of the method is not allowed.
        """
        if model.config.is_encoder_decoder:  # before its arguments, which are others
            refuse_unverifiable(model)
        caller = caller_of(model)
        with ended_on_error(caller.streamer), ended_on_error(step_streamer):
            if step_streamer is None:
                stream = TokenStream(caller.streamer, has_prompt=True)
            elif caller.streamer is None:
                stream = TokenStream(step_streamer, is_by_token=False)
            else:
                raise ValueError("streamer, step_streamer: got both; allowed: one of them")
            criterion = stop_criterion(
                stop_strings,
                self.tokenizer,
                "transformers keeps it from callables; allowed: custom_generate=recycling(tokenizer=tokenizer)",
            )
            criteria = [*stopping_criteria, *([] if criterion is None else [criterion])]
            streamer = caller.streamer if step_streamer is None else step_streamer
            arguments = {**model_kwargs, **caller.arguments, "streamer": streamer}
            call = PreparedCall(
                model,
                input_ids,
                logits_processor,
                StoppingCriteriaList(criteria),
                generation_config,
                arguments,
                caller.given,
            )
            return self.decode(call, stream)

    def decode(
        self, call: PreparedCall, stream: TokenStream, *, may_leave: bool = False
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode a call that transformers has prepared; results and errors as `__call__`.

        Args:
            call: the call.
            stream: gets the text, if it is one.
            may_leave: whether the call can be left to transformers. Then more than the model's context is refused,
                where a text would end, and several prompts, if they would have to be decoded in turn.
        """
        _drop_unfilled_cache(call.model)
        _check_inputs(call.model)
        check(call)
        decoder = self.prepare(call.model)
        record = Record(call.config)
        requests = row_requests(call, record)
        if may_leave:
            refuse_past_context(decoder.target, requests)
            refuse_in_turn(decoder.target, call)
        if call.num_prompts > 1:
            rows = decoder.texts.steps_of_all(requests)
        else:
            rows = [self._decode_one(decoder, requests[0], call, stream)]
        self.steps = [step for steps in rows for step in steps]
        answers = [[token for step in steps for token in step.tokens] for steps in rows]
        padding = padding_token(call) or 0  # one prompt needs none
        sequences = with_answers(call.input_ids, answers, padding)
        if not call.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, scores=record.scores, logits=record.logits
        )

    def _decode_one(
        self,
        decoder: SpeculativeDecoder,
        request: Request,
        call: PreparedCall,
        stream: TokenStream,
    ) -> list[StepRecord]:
        """Decode a text, hand it to a stream, and return its steps."""
        steps = []
        # An error below would leave the decoder with an open text.
        with closing(decoder.texts.steps_of(request)) as running:
            stream.begin(call.input_ids)
            for step in running:
                steps.append(step)
                stream.add(step.tokens)
        stream.end()
        return steps

    def prepare(self, model: PreTrainedModel) -> SpeculativeDecoder:
        """Return the decoder, which is made and tested once, and anew for a model that was moved or cast.

        Raises:
            ValueError: if the model or an option is not allowed, or another model was used before.
            UnsupportedCallError: if the model cannot be used any more, such as in training mode.
        """
        with self._lock:
            if self.decoder is None:
                decoder = self.decoder_class(model, self.tokenizer, self.method, **self.options)
                if self._saved is not None:
                    decoder.load_matrix(self._saved)
                self._saved, self.decoder = None, decoder
            if self.decoder.target.model is not model:
                raise ValueError(
                    "custom_generate: got another model than at its first call, whose tokens it has "
                    "learned; make one for each model"
                )
            try:
                self.decoder.target.check_unchanged()
            except ValueError:
                self.decoder = self._made_anew(model)
            return self.decoder

    def reset(self) -> None:
        """Forget what the method has learned and the last text, and free its rows."""
        self._saved = None
        if self.decoder is not None:
            self.decoder.reset()

    def save(self, path: str | Path) -> None:
        """Save what the method has learned to a safetensors file.

        Raises:
            ValueError: before the first call, or if the method keeps nothing across prompts.
        """
        if self.decoder is None:
            raise ValueError(
                "save: got no call yet, so nothing was learned; allowed: after the first call"
            )
        self.decoder.save_matrix(path)

    def load(self, path: str | Path) -> None:
        """Load what `save` wrote; before the first call, the file is read when that call begins.

        Raises:
            ValueError: if it does not fit this method, vocabulary and options, here or at the first call.
            FileNotFoundError: if there is no such file.
        """
        with self._lock:
            if self.decoder is not None:
                self.decoder.load_matrix(path)
            elif not Path(path).is_file():
                raise FileNotFoundError(
                    f"load: got {path}, which is not a file; allowed: a file that save wrote"
                )
            else:
                self._saved = Path(path)

    def _made_anew(self, model: PreTrainedModel) -> SpeculativeDecoder:
        try:
            decoder = self.decoder_class(model, self.tokenizer, self.method, **self.options)
        except ValueError as error:
            raise UnsupportedCallError("model", str(error)) from error
        logger.warning(
            "%s: the model was moved, cast or resized; what the method had learned is forgotten",
            decoder.method,
        )
        return decoder

    def _name_of_model(self) -> str:
        return "" if self.decoder is None else type(self.decoder.target.model).__name__


class Recycling(Speculative):
    """`Speculative` with Token Recycling, whose tree is automatic on a CPU."""

    decoder_class = TokenRecycling


def speculative(method: str | None = None, tokenizer: Any = None, **options: Any) -> Speculative:
    """Return a callable for `generate(custom_generate=...)` that decodes with a method.

    Args:
        method: a method's name, or "package.module:DrafterClass"; None: what pays on the model's device.
        tokenizer: for `stop_strings`.
        options: the method's options, such as `num_pred_tokens=5` for pld.

    Raises:
        ValueError: for a tokenizer that is none; at the first call, for an unknown method or option,
            or a value that is not allowed.
    """
    return Speculative(method, tokenizer, **options)


def recycling(tokenizer: Any = None, **options: Any) -> Speculative:
    """Return a callable for `generate(custom_generate=...)` that decodes with Token Recycling.

    On a CPU the tree is automatic: its size follows the measured cost of a node. The paper's tree is
    `tree_version="2.2.2"`.

    Args:
        tokenizer: for `stop_strings`.
        options: the method's options, such as `output_id_topk=16`.

    Raises:
        ValueError: as `speculative`.
    """
    return Recycling(None, tokenizer, **options)


def _drop_unfilled_cache(model: PreTrainedModel) -> None:
    """Drop the static cache that transformers 4 has made for this call, and keeps for the next.

    No pass fills it here, and on an unfilled one its next call fails.
    """
    layers = getattr(model.__dict__.get("_cache"), "layers", ())
    if not all(getattr(layer, "is_initialized", True) for layer in layers):
        del model._cache


def _check_inputs(model: PreTrainedModel) -> None:
    """Refuse a model whose function that prepares inputs was exchanged, as by peft; its class's is proved."""
    prepare = type(model).prepare_inputs_for_generation
    if model.prepare_inputs_for_generation != MethodType(prepare, model):
        raise UnsupportedCallError(
            "model",
            "model: its prepare_inputs_for_generation was replaced, as for a learned prompt; allowed: the "
            "model's own; adapters in the layers, such as LoRA, are fine",
        )
