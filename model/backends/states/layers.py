"""States of a sequence: layers that keep some, whose state can be taken out, put back and branched, and all of a
sequence.

A state is everything that one layer keeps of a sequence, whatever its length: a convolution's last
inputs, a recurrence's sums. It can only move forward, so a state that may be needed again is copied
before the layer reads on: after a draft tree it becomes the state after the last accepted node, and
an earlier one is there only where `mark` has copied it.

transformers 4.57 has no state layer that all models share: each model reads and writes containers of its own
cache, `conv_states[layer]` and the like. Such a model gets its own class, whose containers are views on the state
layers of ours.

Shapes: B branches.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, cache_utils

# The containers of states, by layer, in caches of models of transformers 4.57: lists, dicts or one tensor
# [layers, B, ...].
CONTAINERS = ("conv_states", "ssm_states", "recurrent_states", "conv_cache")
# Attributes of a cache layer that are no state: the rows of its keys, values and index keys.
ROWS = frozenset(
    ("keys", "values", "index_keys", "length", "index_length", "is_initialized", "is_reading_tree")
)
# transformers 4.57 has no such layer: each model keeps its states in a cache of its own.
HAS_STATE_LAYERS = hasattr(cache_utils, "LinearAttentionLayer")
_Stock: Any = getattr(cache_utils, "LinearAttentionLayer", object)
# Older versions of transformers 5 keep one state in a layer, and do not number them.
_ARE_NUMBERED = "number_of_states" in inspect.signature(_Stock.__init__).parameters

# The attributes of a layer that are its state, by name: tensors [B, ...], and dicts of tensors and flags.
State = dict[str, Any]


class StateLayer(_Stock):  # type: ignore[misc]
    """A layer's states of one sequence, or of several branches of it.

    Attributes:
        linear: the state of MiniMax's layers, which know no other way to keep one; None before any token.
        is_reading_tree: whether updates change nothing, since a tree has many states.
    """

    is_compileable = False

    def __init__(self, number_of_states: int) -> None:
        if HAS_STATE_LAYERS:
            _Stock.__init__(
                self, **({"number_of_states": number_of_states} if _ARE_NUMBERED else {})
            )
        self.linear: torch.Tensor | None = None
        self.is_reading_tree = False

    @property
    def is_filled(self) -> bool:
        """Whether it keeps one state, numbered, of at least one token."""
        return getattr(self, "has_previous_state", None) == {0: True}

    def update_conv_state(self, conv_states: torch.Tensor, *place: Any, **options: Any) -> Any:
        """Add inputs of a convolution; return them with those before."""
        if self.is_reading_tree:
            return torch.cat((self.conv_states[0], conv_states), dim=-1)
        return super().update_conv_state(conv_states, *place, **options)

    def update_recurrent_state(self, recurrent_states: Any, *place: Any, **options: Any) -> Any:
        """Replace the state of a recurrence."""
        if self.is_reading_tree:
            return recurrent_states
        return super().update_recurrent_state(recurrent_states, *place, **options)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_of(self.state()))

    def state(self) -> State:
        """Return the state. Tensors are those of the layer, which may write to them when it reads on."""
        kept = {name: value for name, value in self.__dict__.items() if name not in ROWS}
        state: State = mapped(kept, lambda tensor: tensor)
        return state

    def set_state(self, state: State) -> None:
        """Go on from a state, which is the layer's from now on."""
        self.__dict__.update(state)


def num_states_of(layer: object) -> int:
    """Return the number of states of a layer of transformers' cache."""
    kind = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
    if kind is None or not isinstance(layer, kind):
        return 0
    number: int = getattr(layer, "number_of_states", 1)
    return number


def holds_state(layer: object) -> bool:
    """Whether a layer of transformers' cache has read a token into a state."""
    found = getattr(layer, "has_previous_state", False)
    return any(found.values()) if isinstance(found, dict) else bool(found)


def mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return a value in new containers, with this function of each tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: mapped(part, function) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(part, function) for part in value])
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a value."""
    found: list[torch.Tensor] = []
    mapped(value, found.append)
    return found


def copied(state: State) -> State:
    """Return a copy of a state that no layer writes to."""
    found: State = mapped(state, torch.clone)
    return found


def selected(state: State, branches: torch.Tensor) -> State:
    """Return a copy of these branches [n] of a state."""
    found: State = mapped(state, lambda tensor: tensor.index_select(0, branches.to(tensor.device)))
    return found


def num_state_bytes(cache: Any) -> int:
    """Return the memory of all states in a cache of transformers, in bytes."""
    names = ("conv_states", "recurrent_states")
    layers = getattr(cache, "layers", ())
    states = [getattr(layer, name, None) for layer in layers for name in names]
    # Those of caches that one model alone uses; the last one is MiniMax's.
    states += [getattr(cache, name, None) for name in (*CONTAINERS, "linear_cache")]
    return sum(tensor.nbytes for tensor in tensors_of(states))


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
    """Return an empty cache of a model's own class for one sequence; raise ValueError if it takes unknown
    arguments.
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
    """The states of one name, an attribute of each layer of a cache, in place of a model's own container."""

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


class Branches:
    """The states after every node of a tree that follows `base` rows."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.after: dict[int, Callable[[int], State]] = {}  # by layer, gives the state after a node


class SequenceStates:
    """The states of a sequence; empty for attention alone.

    Args:
        layers: of the cache; those that keep states are `StateLayer`s.
        first: states before any token, by layer; None: as the layers are.

    Attributes:
        layers: those with states, by their index.
        num_read: rows that were read, which the layers themselves do not count.
        is_branching: whether a pass over a draft tree is under way.
    """

    def __init__(self, layers: Sequence[object], first: Mapping[int, State] | None = None) -> None:
        self.layers = {
            index: layer for index, layer in enumerate(layers) if isinstance(layer, StateLayer)
        }
        self.num_read = 0
        self.is_branching = False
        self._is_reading = False  # whether a pass is under way, or was broken off
        self._branches: Branches | None = None  # of the last pass, if it was a tree
        if first is not None:
            self._set(first)
        # States that can be taken up again, by the number of rows that they follow.
        self._marked = {0: self.copy()}

    def __bool__(self) -> bool:
        return bool(self.layers)

    @contextmanager
    def reading(self, num_rows: int) -> Iterator[None]:
        """Run a pass over this many rows in the block; if it is broken off, only marked states are whole."""
        self._is_reading = True
        yield
        self._is_reading = False
        self.num_read += num_rows

    @contextmanager
    def branching(self, over: AbstractContextManager[Branches]) -> Iterator[None]:
        """Within the block mixers read a pass as a tree, by `Mixers.over`; `keep` must follow."""
        self.is_branching = True
        with over as branches:
            yield
        self.is_branching = False
        self._branches = branches

    def keep(self, base: int, rows: Sequence[int], length: int) -> None:
        """Take up the states after the kept rows, of `length` in use; arguments as of `TreeCache.keep`.

        Raises:
            ValueError: if states would have to go back to where `mark` was not called.
        """
        if not self.layers:
            return
        if self._branches is not None and rows:
            for index, layer in self.layers.items():
                layer.set_state(self._branches.after[index](rows[-1]))
            return
        kept = base + len(rows)
        # After a tree, states are still those before it.
        num_whole = length if self._branches is None else self._branches.base
        if kept == num_whole and not self._is_reading:
            return
        if kept not in self._marked:
            raise ValueError(
                f"rows: got {kept} of {length}; allowed: {', '.join(map(str, self._marked))}, "
                "since states cannot go back to others"
            )
        self._set(self._marked[kept])
        self._is_reading = False
        self._marked = {known: states for known, states in self._marked.items() if known <= kept}

    def set_length(self, length: int) -> None:
        """State how many rows were read; the states stay as they are."""
        self.num_read = length
        self._branches = None

    def mark(self, length: int) -> None:
        """Keep the present states, those after these rows, to go back to; only the last mark counts."""
        if self.layers and length not in self._marked:
            self._marked = {0: self._marked[0], length: self.copy()}

    def nearest(self, wanted: int, length: int) -> int:
        """Return the most rows, up to `wanted` of `length`, that `keep` can go back to without a draft tree."""
        if not self.layers:
            return wanted
        known = [*self._marked] if self._is_reading else [*self._marked, length]
        return max(number for number in known if number <= wanted)

    def take_from(self, other: SequenceStates, wanted: int, length: int) -> None:
        """Go on from another sequence's states after `wanted` rows, of the `length` that it has in use."""
        if self.layers:
            self._set(other.copy() if wanted == length else other._marked[wanted])

    def copy(self) -> dict[int, State]:
        """Return a copy of the present states, by layer."""
        return {index: copied(layer.state()) for index, layer in self.layers.items()}

    def _set(self, states: Mapping[int, State]) -> None:
        for index, layer in self.layers.items():
            layer.set_state(copied(states[index]))
