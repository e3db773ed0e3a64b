"""Caches of models that keep their states in a class of their own (transformers 4.57).

There is no state layer that all models share in that version: each model reads and writes containers
of its own cache, `conv_states[layer]` and the like. A model gets its own class, whose containers are
views on the state layers of ours.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache

from .layers import CONTAINERS, HAS_STATE_LAYERS, State, mapped

# What our cache has in a way of its own.
REPLACED = frozenset((*CONTAINERS, "key_cache", "value_cache", "has_previous_state"))


def own_cache_class(model: nn.Module) -> type[Any] | None:
    """Return the class of cache that the model alone uses, such as MiniMax's; None if it has none."""
    core: Any = getattr(model, "base_model", model)
    core = getattr(core, "_orig_mod", core)  # a compiled model wraps the original
    module = sys.modules[type(core).__module__]
    for name, kind in vars(module).items():
        is_own = isinstance(kind, type) and kind.__module__ == module.__name__
        if is_own and name.endswith("Cache") and (issubclass(kind, Cache) or not HAS_STATE_LAYERS):
            found: type[Any] = kind
            return found
    return None


def new_own_cache(kind: type[Any], model: Any) -> Any:
    """Return an empty cache of a model's own class for one text.

    Raises:
        ValueError: if the class takes arguments that are not known.
    """
    config = model.config.get_text_config(decoder=True)
    known = {
        "config": config,
        "batch_size": 1,
        "max_batch_size": 1,
        "dtype": model.dtype,
        "device": model.device,
        "devices": [model.device] * config.num_hidden_layers,
    }
    parameters = inspect.signature(kind).parameters.values()
    wanted = {one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD}
    needed = {one.name for one in parameters if one.default is one.empty} & wanted
    if unknown := sorted(needed.difference(known)):
        raise ValueError(f"{kind.__name__} is made from {', '.join(unknown)}")
    return kind(**{name: value for name, value in known.items() if name in wanted})


def states_in(cache: Any, index: int) -> State:
    """Return the states of a layer in a model's own cache, by the names of their containers."""
    found: State = {}
    for name in CONTAINERS:
        states = getattr(cache, name, None)
        if states is not None and index < len(states):
            state = states[index]
            if isinstance(state, torch.Tensor) and state.numel():
                found[name] = state
    return found


def first_states(cache: Any, num_layers: int) -> dict[int, State]:
    """Return the states before any token, by layer, for a model's own cache that has read some."""
    return {index: mapped(states_in(cache, index), torch.zeros_like) for index in range(num_layers)}


def has_read_states(cache: Any, index: int) -> bool:
    """Whether a layer of a model's own cache has read tokens into states; some have states that no layer uses."""
    return any(bool(state.any()) for state in states_in(cache, index).values())


def own_cache_rows(cache: Any, name: str, index: int) -> torch.Tensor | None:
    """Return the keys or values of a layer in a model's own cache; None if it has none."""
    rows = getattr(cache, name, None) or ()
    found = rows[index] if index < len(rows) else None
    return found if isinstance(found, torch.Tensor) else None


class Container:
    """The states of one name of all layers, in place of a model's own container.

    Args:
        layers: of the cache; a state is an attribute of its layer.
        name: of the attribute.
    """

    def __init__(self, layers: Sequence[Any], name: str) -> None:
        self._layers = layers
        self._name = name

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> Any:
        return getattr(self._layers[index], self._name)

    def __setitem__(self, index: int, state: torch.Tensor) -> None:
        setattr(self._layers[index], self._name, state)

    @property
    def device(self) -> torch.device:
        """The device of the first layer's state."""
        device: torch.device = self[0].device
        return device


class WatchedContainer:
    """A container that reports each layer whose state is read or written."""

    def __init__(self, container: Container, report: Callable[[int], None]) -> None:
        self._container = container
        self._report = report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)

    def __len__(self) -> int:
        return len(self._container)

    def __getitem__(self, index: int) -> Any:
        self._report(index)
        return self._container[index]

    def __setitem__(self, index: int, state: torch.Tensor) -> None:
        self._report(index)
        self._container[index] = state
