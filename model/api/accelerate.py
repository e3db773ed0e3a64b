"""`accelerate(model, tokenizer)`: the model's own `generate` decodes with drafts, for code that stays as it is.

    from model.api.accelerate import accelerate, restore

    accelerate(model, tokenizer)
    model.generate(**inputs, max_new_tokens=100, streamer=streamer)
    restore(model)

`generate` takes what transformers' takes, and gives its tokens. What cannot be decoded with drafts
(`generate_arguments.py` lists it) is left to transformers' own, with a warning.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput

from ..engine.step import StepRecord
from .custom_generate import Speculative, caller_of
from .generate_arguments import BEFOREHAND, BY_NAME, UnsupportedCallError, refusal
from .loading import without_wrapper
from .prepared_call import PreparedCall
from .stop_strings import stop_criterion
from .streamers import TokenStream, ended_on_error

logger = logging.getLogger(__name__)

Model = TypeVar("Model")
Generated: TypeAlias = torch.Tensor | GenerateDecoderOnlyOutput


def accelerate(
    model: Model,
    tokenizer: Any = None,
    method: str | None = None,
    *,
    fallback: bool = True,
    **options: Any,
) -> Model:
    """Let a model's own `generate` decode with a method, with the tokens of transformers' `generate`.

    `model.generate` then also has `steps`, `accept_lengths`, `save`, `load` and `reset`. A model that
    is accelerated already gets the new method and options, and begins anew.

    Args:
        model: a loaded causal LM in eval mode, also with peft's LoRA adapters or compiled.
        tokenizer: for calls with `stop_strings` that give none.
        method: a method's name, such as "recycling" or "hybrid", or "package.module:DrafterClass"; None: what
            pays on the model's device.
        fallback: leave calls that cannot be decoded with drafts (beams, an assistant model, draws of several
            prompts and the like) to transformers' own `generate`, with one warning for each kind; False raises
            UnsupportedCallError.
        options: the method's options, such as `output_id_topk=16` for recycling.

    Returns:
        The model itself.

    Raises:
        ValueError: if model or tokenizer is something else, for an unknown method or option, or a value
            that is not allowed.
        UnsupportedModelError: if drafts cannot be verified exactly with this model.
    """
    base = _base_of(model)
    if not isinstance(base.__dict__.get("generate"), AcceleratedGenerate | None):
        raise ValueError(
            "model: its generate was replaced; allowed: the one of its class; undo that first, for "
            "example with `del model.generate`"
        )
    attention = base.config._attn_implementation
    decode = Speculative(method, tokenizer, **options)
    decode.prepare(base)
    restore(base)
    base.generate = AcceleratedGenerate(base, decode, fallback, attention)
    return model


def restore(model: Model) -> Model:
    """Undo `accelerate`; a model that is not accelerated stays as it is. Returns the model itself."""
    base = _base_of(model)
    generate = base.__dict__.get("generate")
    if isinstance(generate, AcceleratedGenerate):
        del base.generate
        if base.config._attn_implementation != generate.attention:
            base.set_attn_implementation(generate.attention)
    return model


class AcceleratedGenerate:
    """The `generate` of an accelerated model; arguments and results as of transformers' own.

    Args:
        model: the model.
        decode: the method, with its memory.
        fallback: whether calls that cannot be decoded with drafts go to transformers.
        attention: the model's attention implementation before it was accelerated.
    """

    def __init__(
        self, model: PreTrainedModel, decode: Speculative, fallback: bool, attention: str
    ) -> None:
        self.decode = decode
        self.attention = attention
        self._model = model
        self._fallback = fallback
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"<generate of a {type(self._model).__name__} with {self.decode!r}>"

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self._model).generate.__get__(self._model))

    @property
    def steps(self) -> list[StepRecord]:
        """Records of the steps of the call that ended last, of those with drafts."""
        return self.decode.steps

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens emitted by each of these steps, bonus token included."""
        return self.decode.accept_lengths

    def save(self, path: str | Path) -> None:
        """Save what the method has learned; as `Speculative.save`."""
        self.decode.save(path)

    def load(self, path: str | Path) -> None:
        """Load what `save` wrote; as `Speculative.load`."""
        self.decode.load(path)

    def reset(self) -> None:
        """Forget what the method has learned and the last text, and free its rows."""
        self.decode.reset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate.

        Raises:
            UnsupportedCallError: for what cannot be decoded with drafts, if `fallback` is False.
            ValueError: as transformers' own.
        """
        generate = type(self._model).generate
        given = _by_name(generate, self._model, args, kwargs)
        if given.get("custom_generate") is not None:  # asked for, and no call of ours
            return generate(self._model, **given)
        if self.decode.tokenizer is not None and given.get("tokenizer") is None:
            given["tokenizer"] = self.decode.tokenizer
        with ended_on_error(given.get("streamer")):
            try:
                return decode_call(generate, self._model, self.decode, given, may_leave=True)
            except UnsupportedCallError as error:
                if not self._fallback:
                    raise
                self._warn_of(error)
            return generate(self._model, **given)

    def _warn_of(self, error: UnsupportedCallError) -> None:
        if error.argument not in self._warned:
            self._warned.add(error.argument)
            logger.warning(
                "accelerate: %s; such calls are left to transformers' own generate, without drafts",
                error,
            )


def generate_from_folder(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    method: str | None = None,
    method_options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Generated:
    """Generate with a method, as `model.generate` does: the function of a `custom_generate` folder.

    The model keeps the matrix from call to call, as long as method and options stay the same.

    Args:
        model: the model whose `generate` is called.
        inputs: as for `generate`.
        method: a method's name, or "package.module:DrafterClass"; None: what pays on the model's device.
        method_options: the method's options.
        arguments: all other arguments of `generate`.

    Raises:
        UnsupportedCallError: for anything that is not supported.
        ValueError: for an option that is not allowed, or a model that cannot be used.
    """
    options = method_options or {}
    decode = model.__dict__.get("_speculative")
    if decode is None or (decode.method, decode.options) != (method, options):
        decode = Speculative(method, **options)
        model.__dict__["_speculative"] = decode
    with ended_on_error(arguments.get("streamer")):
        # The class's method: with such a folder, the model's own `generate` is this function.
        given = {"inputs": inputs, **arguments}
        result: Generated = decode_call(GenerationMixin.generate, model, decode, given)
        return result


def decode_call(
    generate: Callable[..., Any],
    model: PreTrainedModel,
    decode: Speculative,
    given: Mapping[str, Any],
    may_leave: bool = False,
) -> Any:
    """Let transformers prepare a call, and decode it with drafts.

    Args:
        generate: of the model's class.
        model: the model.
        decode: the method.
        given: the call's arguments, by name.
        may_leave: as for `Speculative.decode`.

    Raises:
        UnsupportedCallError: before the first token, if it cannot be decoded with drafts.
    """
    _refuse_beforehand(model, given)
    words = _with_stop_criterion(model, given)
    streamer = words.pop("streamer", None)
    for name in ("tokenizer", "custom_generate"):
        words.pop(name, None)
    is_reached = False

    def prepared(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Generated:
        nonlocal is_reached
        is_reached = True
        caller = caller_of(model)
        arguments = {**model_kwargs, **caller.arguments, "streamer": streamer}
        call = PreparedCall(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            arguments,
            frozenset(given),
        )
        return decode.decode(call, TokenStream(streamer), may_leave=may_leave)

    result = generate(model, **words, custom_generate=prepared)
    if not is_reached:
        raise UnsupportedCallError(
            "generate",
            f"generate: got a generate of {type(model).__name__}'s own, which does not call custom_generate; "
            "allowed: the generate of transformers",
        )
    return result


def _refuse_beforehand(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Refuse settings on which transformers acts before it calls a callable."""
    for name in BEFOREHAND:
        value = _setting(model, given, name)
        if value in (True, "paged"):
            origin = (
                "" if name in given else " (from the generation_config, not from the call itself)"
            )
            raise refusal(name, value, BY_NAME[name].allowed, origin)


def _with_stop_criterion(model: PreTrainedModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments with the criterion in place of `stop_strings`.

    Transformers makes it with the tokenizer, which it keeps from callables.
    """
    words = dict(given)
    strings: str | Sequence[str] | None = _setting(model, given, "stop_strings")
    if not strings:
        return words
    words["stop_strings"] = None  # also those of a generation config
    criterion = stop_criterion(
        strings, given.get("tokenizer"), "give tokenizer= to accelerate or to generate"
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


def _by_name(
    generate: Callable[..., Any],
    model: PreTrainedModel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a call of `generate` by their names."""
    signature = inspect.signature(generate)
    given = dict(signature.bind(model, *args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(parameter.name, {}))
    del given[next(iter(signature.parameters))]  # the model
    return given


def _base_of(model: Any) -> PreTrainedModel:
    """Return the model whose `generate` is called, without wrappers of peft and torch.compile.

    Raises:
        ValueError: for anything but a loaded causal LM.
    """
    base: PreTrainedModel = without_wrapper(model)
    base = getattr(base, "_orig_mod", base)  # of torch.compile
    if not isinstance(base, GenerationMixin):
        raise ValueError(
            f"model: got a {type(base).__name__}, which has no generate; allowed: a loaded causal LM"
        )
    return base
