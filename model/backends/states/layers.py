"""State layers of a cache: transformers' own, whose state can be taken out, put back and branched.

A state is everything that one layer keeps of a text, whatever its length: a convolution's last
inputs, a recurrence's sums. It can only move forward, so a state that may be needed again is copied
before the layer reads on.

Shapes: B branches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import cache_utils

# The containers of states, by layer, in caches of models of transformers 4.57 (`own_cache`): lists, dicts or
# one tensor [layers, B, ...].
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
    """A layer's states of one text, or of several branches of it.

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
