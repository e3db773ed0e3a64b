"""The decoder layers of a model that run as programs in our passes.

A layer of a small model is some sixty calls of torch, most of which take longer to call than to compute. As a
program it is one call, which also appends to the cache and attends by our kernel; where a pass attends otherwise,
it is two calls around its attention (`capture`, `program`). Layers of one kind share a program. Each
layer's program is proved: on the numbers of a plain pass it gives what the layer gives, but for rounding. Other
layers run as they are. In float32 near-ties are decided with the layers themselves (`reference`), as with other
kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from ...kernels.attention import FEW_QUERIES
from ...kernels.linear import PackedLinear, is_exact, most_rows
from ...kernels.norms import FusedNorm, find_norms
from ...kernels.short_pass import additive, is_for_draft
from ...machine.own_forwards import OwnForwards
from .capture import PLAIN_VALUES, Captured, LayerCall, NoProgramError, captured
from .program import Part, Programs, programs, rewrite

NO_MASK = torch.empty(0)


class Attending:
    """The attention of the pass that runs, which its layers share; found once: a config is slow to read."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.find()

    def find(self) -> None:
        """Take the attention that is in use now."""
        name = self._config._attn_implementation
        self.attend: Callable[..., Any] = AttentionInterface()[name]
        self.is_kernel = name == FEW_QUERIES
        self._mask: tuple[torch.Tensor | None, torch.Tensor] = (None, NO_MASK)

    def additive(self, mask: torch.Tensor | None) -> torch.Tensor:
        """Return a mask as the kernel wants it; all layers of a pass with the same mask share it."""
        known, found = self._mask
        if known is not mask:
            found = NO_MASK if mask is None else additive(mask)
            self._mask = (mask, found)
        return found


class ProgrammedLayer:
    """The forward pass of a decoder layer, which caches under this index, as programs around its attention."""

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        shape: Captured,
        parts: Programs,
        attending: Attending,
    ) -> None:
        self._layer, self._index, self._attending = layer, index, attending
        self.cache = shape.cache  # name of the argument
        self._constants = shape.constants
        names = {name if isinstance(name, str) else name[0] for name in shape.inputs[1:]}
        self._names = {*names, *shape.constants, shape.cache, "attention_mask"}
        self._is_tuple = shape.is_tuple
        self._attention = layer.get_submodule(shape.attended.module)
        self._options = shape.attended.options
        self._before, self._after = (
            _BoundPart(layer, shape, part) for part in (parts.before, parts.after)
        )
        self._whole = parts.whole and _BoundPart(layer, shape, parts.whole)

    def __call__(self, rows: torch.Tensor, *others: Any, **named: Any) -> Any:
        """Return the layer's rows [1, n, D]; calls with other arguments go to the layer."""
        cache = named.get(self.cache)
        if others or cache is None or rows.shape[0] != 1 or not self._is_usual(named):
            return type(self._layer).forward(self._layer, rows, *others, **named)
        found = self.at_once(cache, rows, named) if self._attending.is_kernel else None
        if found is None:
            query, keys, values, *carried = self._before([], rows, named)
            keys, values = cache.update(keys, values, self._index)
            mask = named.get("attention_mask")
            attended, _ = self._attending.attend(
                self._attention, query, keys, values, mask, **self._options
            )
            (found,) = self._after([attended, *carried], rows, named)
        return (found,) if self._is_tuple else found

    def at_once(
        self, cache: Any, rows: torch.Tensor, named: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Return the layer's rows by one call with the kernel's attention; None if it is not for this call."""
        of_layer = getattr(cache, "plain_layer", None)
        layer = of_layer(self._index) if of_layer and self._whole else None
        mask, num_rows = named.get("attention_mask"), rows.shape[1]
        if layer is None or not is_for_draft(mask, num_rows, layer.length + num_rows):
            return None
        assert self._whole
        handed = [layer.keys, layer.values, self._attending.additive(mask)]
        (found,) = self._whole(handed, rows, named, layer.claim(num_rows))
        return found

    def _is_usual(self, named: Mapping[str, Any]) -> bool:
        """Whether a call has the arguments of those that were captured."""
        if not self._names.issuperset(named):
            return False
        return all(named.get(name) == value for name, value in self._constants.items())


class _BoundPart:
    """A part of a layer's programs, with the layer's own weights."""

    def __init__(self, layer: nn.Module, shape: Captured, part: Part) -> None:
        self._run = part.program.run
        self._inputs = [shape.inputs[index] for index in part.inputs]
        self._weights = [_place(layer, shape.weights[index]) for index in part.weights]

    def __call__(
        self,
        handed: list[torch.Tensor],
        rows: torch.Tensor,
        named: Mapping[str, Any],
        length: int = 0,
    ) -> list[torch.Tensor]:
        for name in self._inputs:
            if isinstance(name, tuple):
                handed.append(named[name[0]][name[1]])
            else:
                handed.append(named[name] if name else rows)
        # Read anew: a user may have put other weights in their place.
        handed += [weights[name] for weights, name in self._weights]
        found: list[torch.Tensor] = self._run(handed, rows.shape[1], length)
        return found


def _place(layer: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the table in which a module keeps a parameter or buffer, and its name there."""
    path, _, leaf = name.rpartition(".")
    module = layer.get_submodule(path)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


class LayerPrograms:
    """The layers of a model's passes that run as programs."""

    def __init__(
        self,
        layers: Mapping[nn.Module, ProgrammedLayer],
        dtype: torch.dtype,
        attending: Attending | None = None,  # None without programs
    ) -> None:
        self.name = f"programs-{len(layers)}" if layers else "as-they-are"
        self.is_plain = not layers or not is_exact(dtype)
        self.layers = OwnForwards(layers)
        self._most_rows, self._attending = most_rows(dtype), attending
        # The modules within, which these passes do not call.
        self.inner = {module for layer in layers for module in layer.modules()} - {*layers}

    def __bool__(self) -> bool:
        return bool(self.layers)

    def are_used(self, num_rows: int, in_reference: bool = False) -> bool:
        """Whether a pass over `num_rows` rows uses them: not while a module within has hooks, or a function of a
        user's in place of its own.
        """
        is_on = self.is_plain or not in_reference
        is_for_them = bool(self.layers) and num_rows <= self._most_rows and is_on
        return is_for_them and not any(map(_is_changed, self.inner))

    def begin_pass(self) -> None:
        """Prepare for a pass that uses them; its attention is in use already."""
        assert self._attending is not None
        self._attending.find()

    def is_reference(self, num_rows: int) -> bool:
        """Whether a pass over `num_rows` rows has reference arithmetic as it is."""
        return self.is_plain or num_rows > self._most_rows


def _is_changed(module: nn.Module) -> bool:
    own = module.__dict__
    return bool("forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"])


logger = logging.getLogger(__name__)

# Tokens of the plain passes whose calls are captured and proved.
FEW, MANY = 3, 5
# Largest difference of a layer's rows, in steps of the dtype at the largest number: sums in another order.
MOST_STEPS = 64


class _Calls(NamedTuple):
    """What the layers of a plain pass were given and returned, by their number, and its cache."""

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
    few, many = (_watched(layers, run, num_tokens) for num_tokens in (FEW, MANY))
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
            _prove(programmed, many.given[index], many.returned[index], cache)
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


def _watched(layers: Sequence[nn.Module], run: Callable[[int], Any], num_tokens: int) -> _Calls:
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
    """Return what layers of a kind compute, from the calls of one of them; or raise NoProgramError."""
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
        is_known = name.startswith(("torch.nn.", "transformers.")) or type(module) is PackedLinear
        if not is_known or "forward" in module.__dict__:
            raise NoProgramError(f"a layer with {type(module).__name__} from outside transformers")
    for weight in (*layer.parameters(), *layer.buffers()):
        if type(weight) not in (nn.Parameter, torch.Tensor) or weight.device.type != "cpu":
            raise NoProgramError("a layer with weights of another kind, or on another device")


def _kind(layer: nn.Module) -> Hashable:
    """Return what layers must share to compute the same, but for weights."""
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
    programmed: ProgrammedLayer, call: LayerCall, expected: torch.Tensor, cache: Any
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
    largest = float(expected.abs().max())
    for found in (in_two[0] if isinstance(in_two, tuple) else in_two, at_once):
        difference = 0.0 if found is None else float((found - expected).abs().max())
        if not difference <= MOST_STEPS * torch.finfo(expected.dtype).eps * largest:
            raise NoProgramError(f"a program that differs from its layer by {difference:.1e}")
