"""`accelerate(model, tokenizer)`: the model's own `generate` decodes with drafts, for code that stays as it is.

    from model.api.accelerate import accelerate, restore

    accelerate(model, tokenizer)
    model.generate(**inputs, max_new_tokens=100, streamer=streamer)
    restore(model)

`generate` takes what transformers' takes, and gives its tokens. What cannot be decoded with drafts
(`generate_arguments.py` lists it) is left to transformers' own, with a warning. For single calls there are
`custom_generate=recycling()` and an exported folder: the same door, where such calls are refused.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from transformers import GenerationMixin, PreTrainedModel

from ..machine.own_forwards import in_pass
from ..methods import CustomMethod, MethodName
from .decoder import TokenRecycling
from .generate_arguments import UnsupportedCallError
from .loading.models import without_wrapper
from .speculative_method import Generated, SpeculativeMethod, ended_on_error

logger = logging.getLogger(__name__)

Model = TypeVar("Model")


class AcceleratedGenerate(SpeculativeMethod):
    """The `generate` of an accelerated model; arguments and results as of transformers' own.

    `attention` is the model's attention implementation before it was accelerated. With `fallback`, calls that
    cannot be decoded with drafts go to transformers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: str,
        fallback: bool,
        method: MethodName | CustomMethod | None,
        tokenizer: Any,
        /,
        **options: Any,
    ) -> None:
        super().__init__(method, tokenizer, **options)
        self.attention = attention
        self._model = model
        self._fallback = fallback
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        own = (self._model, self.attention, self._fallback, self.method, self.tokenizer)
        return partial(type(self), **self.options), own

    def __repr__(self) -> str:
        return f"<generate of a {type(self._model).__name__} with {super().__repr__()}>"

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self._model).generate.__get__(self._model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generate = type(self._model).generate
        given = _by_name(generate, self._model, args, kwargs)
        if given.get("custom_generate") is not None:  # asked for, and no call of ours
            return generate(self._model, **given)
        if self.tokenizer is not None and given.get("tokenizer") is None:
            given["tokenizer"] = self.tokenizer
        with ended_on_error(given):
            try:
                return self.generate(generate, self._model, given, may_leave=True)
            except UnsupportedCallError as error:
                if not self._fallback:
                    raise
                if error.argument not in self._warned:
                    self._warned.add(error.argument)
                    logger.warning(
                        "accelerate: %s; such calls are left to transformers' own generate, without drafts",
                        error,
                    )
            return generate(self._model, **given)


def accelerate(
    model: Model,
    tokenizer: Any = None,
    method: MethodName | CustomMethod | None = None,
    *,
    fallback: bool = True,
    **options: Any,
) -> Model:
    """Let a model's own `generate` decode with a method, with the tokens of transformers' `generate`.

    `model.generate` then also has `steps`, `accept_lengths`, `save_memory`, `load_memory` and `reset`. A model
    that is accelerated already gets the new method and options, and begins anew.

    Args:
        model: a loaded causal LM in eval mode, also with peft's LoRA adapters or compiled.
        tokenizer: for calls with `stop_strings` that give none.
        method: a method's name, such as "recycling" or "hybrid", or `CustomMethod("package.module:DrafterClass")`;
            None: what pays on the model's device.
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
    generate = AcceleratedGenerate(base, attention, fallback, method, tokenizer, **options)
    generate.prepare(base)
    restore(base)
    base.generate = generate
    return model


def accelerated(model: Any) -> AcceleratedGenerate:
    """Return an accelerated model's `generate` with the type that has `steps`, `reset` and the others.

    Raises:
        ValueError: if the model is not accelerated.
    """
    generate = _base_of(model).__dict__.get("generate")
    if not isinstance(generate, AcceleratedGenerate):
        raise ValueError("model: is not accelerated; allowed: after accelerate(model)")
    return generate


def restore(model: Model) -> Model:
    """Undo `accelerate`; a model that is not accelerated stays as it is. Returns the model itself."""
    base = _base_of(model)
    generate = base.__dict__.get("generate")
    if isinstance(generate, AcceleratedGenerate):
        del base.generate
        if base.config._attn_implementation != generate.attention:
            base.set_attn_implementation(generate.attention)
    return model


def _by_name(
    generate: Callable[..., Any],
    model: PreTrainedModel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a call of a class's `generate` by their names, without the model."""
    signature = inspect.signature(generate)
    given = dict(signature.bind(model, *args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(parameter.name, {}))
    del given[next(iter(signature.parameters))]
    return given


def _base_of(model: Any) -> PreTrainedModel:
    """Return the model whose `generate` is called, without wrappers of peft and torch.compile."""
    base: PreTrainedModel = without_wrapper(model)
    base = getattr(base, "_orig_mod", base)  # of torch.compile
    if not isinstance(base, GenerationMixin):
        raise ValueError(
            f"model: got a {type(base).__name__}, which has no generate; allowed: a loaded causal LM"
        )
    return base


class Speculative(SpeculativeMethod):
    """A method as a callable for `generate(custom_generate=...)`; arguments as of `SpeculativeMethod`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Generated:
        """Decode what transformers has prepared, in the form of a callable; `_with_whole_calls` leads past it."""
        logger.warning(
            "custom_generate: the library was imported within the call, whose streamer, tokenizer, assistant_model "
            "and synced_gpus it does not see; import it before"
        )
        return self.decode({}, False, *args, **kwargs)


class Recycling(Speculative):
    """`Speculative` with Token Recycling, whose tree is automatic on a CPU."""

    decoder_class = TokenRecycling


def _with_whole_calls(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' `generate`, which gives a call with a callable of ours to it whole.

    It keeps `streamer`, `tokenizer`, `assistant_model` and `synced_gpus` from callables: whoever reads the streamer
    would wait for ever, and the others would be ignored silently.
    """

    @wraps(own)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        decode = kwargs.get("custom_generate")
        if not isinstance(decode, Speculative):
            with in_pass(False):  # else a hook's call would compute with the functions of its pass
                return own(self, *args, **kwargs)
        given = _by_name(own, self, args, kwargs)
        with ended_on_error(given):
            return decode.generate(own, self, given)

    return generate


# At import: a call looks `generate` up before a callable among its arguments is made.
GenerationMixin.generate = _with_whole_calls(GenerationMixin.generate)


def speculative(
    method: MethodName | CustomMethod | None = None, tokenizer: Any = None, **options: Any
) -> Speculative:
    """Return a callable for `generate(custom_generate=...)` that decodes with a method.

    Args:
        method: a method's name, or `CustomMethod("package.module:DrafterClass")`; None: what pays on the model's
            device.
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


def generate_from_folder(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    method: MethodName | CustomMethod | None = None,
    method_options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Generated:
    """Generate with a method, as `model.generate` does: the function of a `custom_generate` folder.

    The model keeps the matrix from call to call, as long as method and options, as of `speculative`, stay the same.
    """
    options = method_options or {}
    decode = model.__dict__.get("_speculative")
    if decode is None or (decode.method, decode.options) != (method, options):
        decode = SpeculativeMethod(method, **options)
        model.__dict__["_speculative"] = decode
    # The class's method: with such a folder, the model's own `generate` is this function.
    given = {"inputs": inputs, **arguments}
    with ended_on_error(given):
        result: Generated = decode.generate(GenerationMixin.generate, model, given)
        return result
