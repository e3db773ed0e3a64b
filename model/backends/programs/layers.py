"""The decoder layers of a model that run as programs in our passes.

A layer of a small model is some sixty calls of torch, most of which take longer to call than to compute. As a
program it is one call, which also appends to the cache and attends by our kernel; where a pass attends otherwise,
it is two calls around its attention (`capture`, `program`, `run`). Layers of one kind share a program. Each
layer's program is proved: on the numbers of a plain pass it gives what the layer gives, but for rounding. Other
layers run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ...kernels.linear import WHOLE_STEP, QuantisedLinear, is_whole
from ...kernels.norms import FusedNorm, find_norms
from .capture import PLAIN_VALUES, Captured, LayerCall, NoProgramError, captured
from .program import Programs, programs, rewrite
from .run import Attending, LayerPrograms, ProgrammedLayer

logger = logging.getLogger(__name__)

# Tokens of the plain passes whose calls are captured and proved.
FEW, MANY = 3, 5
# Largest difference of a layer's rows, in steps of the dtype at the largest number: sums in another order.
MOST_STEPS = 64


class _Calls(NamedTuple):
    """Arguments and results of the layers of a plain pass, by their number, and its cache."""

    cache: Any
    given: dict[int, LayerCall]
    returned: dict[int, torch.Tensor]


@torch.inference_mode()
def layer_programs(
    model: PreTrainedModel,
    layers: Sequence[nn.Module],
    run: Callable[[int], Any],
    new_cache: Callable[[int], Any],
) -> LayerPrograms:
    """Return the programs of a model's decoder layers, in order, on the CPU.

    `run` runs a plain pass over so many tokens and returns its cache; `new_cache` makes an empty one of our passes.
    """
    few, many = (watched(layers, run, num_tokens) for num_tokens in (FEW, MANY))
    norms = find_norms(model, model.dtype, "cpu")
    config = model.config.get_text_config(decoder=True)
    shapes: dict[Hashable, tuple[Captured, Programs] | NoProgramError] = {}
    found: dict[nn.Module, ProgrammedLayer] = {}
    reasons: list[str] = []
    attending = Attending(config)
    cache = new_cache(MANY)
    for index, layer in enumerate(layers):
        key = _kind(layer)
        try:
            if key not in shapes:
                shapes[key] = _shape(layer, index, few, many, config, norms)
            shape = shapes[key]
            if isinstance(shape, NoProgramError):
                raise shape
            programmed = ProgrammedLayer(layer, index, *shape, attending)
            _prove(programmed, layer, many.given[index], many.returned[index], cache)
        except NoProgramError as error:
            shapes.setdefault(key, error)
            reasons.append(str(error))
        else:
            found[layer] = programmed
    if reasons:
        kind = f"model type {config.model_type}"
        message = "%s: %d of %d layers run as programs; the others as they are: %s"
        logger.info(message, kind, len(found), len(layers), reasons[0])
    return LayerPrograms(found, model.dtype, attending)


def watched(layers: Sequence[nn.Module], run: Callable[[int], Any], num_tokens: int) -> _Calls:
    """Run a plain pass; return what its layers were given, and returned."""
    given: dict[int, LayerCall] = {}
    returned: dict[int, Any] = {}
    thread = get_ident()

    def watch(index: int) -> Callable[..., None]:
        def note(module: nn.Module, arguments: Any, named: dict[str, Any], output: Any) -> None:
            if len(arguments) == 1 and get_ident() == thread:
                given[index] = LayerCall(arguments[0], named)
                returned[index] = output[0] if isinstance(output, tuple) else output

        return note

    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            handle = layer.register_forward_hook(watch(index), with_kwargs=True)
            stack.callback(handle.remove)
        cache = run(num_tokens)
    return _Calls(cache, given, returned)


def _shape(
    layer: nn.Module,
    index: int,
    few: _Calls,
    many: _Calls,
    config: Any,
    norms: Mapping[nn.Module, FusedNorm],
) -> tuple[Captured, Programs]:
    """Return the graph and programs of layers of a kind, from the calls of one; or raise NoProgramError."""
    _refuse_other_code(layer)
    if index not in few.given or index not in many.given:
        raise NoProgramError("a layer that is given more than its rows by place")
    calls = (few.given[index], many.given[index])
    names = [name for name, value in calls[1].named.items() if value is many.cache]
    if len(names) != 1:
        raise NoProgramError("a layer without a cache")
    within = {module: norm for module, norm in norms.items() if module in {*layer.modules()}}
    shape = captured(layer, index, calls, names[0], config, within)
    rewrite(shape.graph)
    return shape, programs(shape)


def _refuse_other_code(layer: nn.Module) -> None:
    """Raise NoProgramError for modules that may compute otherwise another time, or have unusual weights."""
    for module in layer.modules():
        name = f"{type(module).__module__}."
        is_known = (
            name.startswith(("torch.nn.", "transformers.")) or type(module) is QuantisedLinear
        )
        if not is_known or "forward" in module.__dict__:
            raise NoProgramError(f"a layer with {type(module).__name__} from outside transformers")
    for weight in (*layer.parameters(), *layer.buffers()):
        if type(weight) not in (nn.Parameter, torch.Tensor) or weight.device.type != "cpu":
            raise NoProgramError("a layer with weights of another kind, or on another device")


def _kind(layer: nn.Module) -> Hashable:
    """Return a key that is equal for layers that compute the same, but for weights."""
    weights = (*layer.named_parameters(), *layer.named_buffers())
    return (
        tuple((name, tuple(weight.shape), weight.dtype) for name, weight in weights),
        tuple(
            (name, type(module), *sorted(_settings(module)))
            for name, module in layer.named_modules()
        ),
    )


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "layer_idx":
            yield name, repr(value) if isinstance(value, PLAIN_VALUES) else type(value).__name__


def _prove(
    programmed: ProgrammedLayer,
    layer: nn.Module,
    call: LayerCall,
    expected: torch.Tensor,
    cache: Any,
) -> None:
    """Raise NoProgramError if a program does not give what its layer gave, in two calls or in one."""
    named = {**call.named, programmed.cache: cache}
    in_two = programmed(call.rows, **named)
    cache.set_length(0)
    if named.get("attention_mask") is None:
        num_rows = call.rows.shape[1]
        named["attention_mask"] = torch.ones(1, 1, num_rows, num_rows, dtype=torch.bool).tril()
    at_once = programmed.at_once(cache, call.rows, named)
    cache.set_length(0)
    allowed = MOST_STEPS * torch.finfo(expected.dtype).eps
    if any(map(is_whole, layer.buffers())):
        allowed = max(allowed, WHOLE_STEP)
    allowed *= float(expected.abs().max())
    for found in (in_two[0] if isinstance(in_two, tuple) else in_two, at_once):
        difference = 0.0 if found is None else float((found - expected).abs().max())
        if not difference <= allowed:
            raise NoProgramError(f"a program that differs from its layer by {difference:.1e}")
