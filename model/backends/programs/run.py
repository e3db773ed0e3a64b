"""Decoder layers that run as programs in a pass.

In float32 near-ties are decided with the layers themselves (`reference`), as with other kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...kernels.attention import FEW_QUERIES
from ...kernels.linear import is_exact, most_rows
from ...kernels.operations import additive, is_for_draft
from ...machine.own_forwards import OwnForwards
from .capture import Captured
from .program import LayerPart, Programs

NO_MASK = torch.empty(0)


class Attending:
    """The attention of the pass that runs, which its layers share; found once: a config is slow to read."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.find()

    def find(self) -> None:
        """Take the attention that is in use now."""
        name = self._config._attn_implementation
        self.attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
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
        self, layer: nn.Module, index: int, shape: Captured, parts: Programs, attending: Attending
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

    def __init__(self, layer: nn.Module, shape: Captured, part: LayerPart) -> None:
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
