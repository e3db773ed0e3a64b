"""TreeCache: the KV cache of tree verification, a Hugging Face `Cache` over preallocated buffers.

A forward pass over a draft tree appends the rows of ALL nodes; `keep` then moves the accepted rows
into place and forgets the rest: O(accepted), whatever the context length. Every layer holds the
full length, sliding-window layers too (the window is in the mask), because a ring buffer cannot be
branched.

Keys and values of all layers that share a shape live in one buffer, so `keep` is one gather and one
copy. Layers that keep a recurrent or convolution state (`model.states`) cannot forget rows: after a
tree they take up the state after the last accepted node, and an earlier state is there only where
`mark` has copied it.

Shapes: H key-value heads, M capacity (rows), T rows in use, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..machine.transfer import uploaded
from ..states.layers import CONTAINERS, State, StateLayer, copied
from ..states.mixers import Branches, Mixers
from ..states.own_cache import REPLACED, Container
from .tree import TreeTopology


@dataclass(frozen=True, slots=True)
class BufferShape:
    """Shape of one cached tensor (the keys or the values of one layer), without its length."""

    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shapes of one layer's cached tensors, and the number of its states.

    Attributes:
        keys, values: of attention; they differ in multi-head latent attention. None if there is none.
        index_keys: by which indexed attention chooses its keys; None if it sees all.
        num_states: recurrent or convolution states.
    """

    keys: BufferShape | None
    values: BufferShape | None
    index_keys: BufferShape | None = None
    num_states: int = 0

    @property
    def buffers(self) -> tuple[BufferShape, ...]:
        """Shapes of the cached tensors that have a row for each token."""
        parts = (self.keys, self.values, self.index_keys)
        return tuple(part for part in parts if part is not None)


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view into the buffers of a `TreeCache`."""

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        key_buffer: torch.Tensor,
        value_buffer: torch.Tensor,
        index_buffer: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.keys = key_buffer  # [1, H, M, D]
        self.values = value_buffer  # [1, H, M, D]
        self.index_keys = index_buffer  # [1, 1, M, D]
        self.length = self.index_length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, *args: torch.Tensor) -> None:
        """Do nothing: the buffers exist from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows [1, H, n, D] and return views of all rows in use."""
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            raise ValueError(
                f"KV cache is full: {end} rows asked for, capacity {self.keys.shape[-2]}"
            )
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def update_indexer(self, index_states: torch.Tensor) -> torch.Tensor:
        """Append rows [1, n, D] of index keys and return a view of all rows in use."""
        assert self.index_keys is not None
        begin, end = self.index_length, self.index_length + index_states.shape[1]
        self.index_keys[0, :, begin:end] = index_states
        self.index_length = end
        return self.index_keys[0, :, :end]

    def get_seq_length(self, *args: object) -> int:
        """Return the number of rows in use T."""
        return self.length

    def get_max_length(self) -> int:
        """Return the capacity M (transformers 5.x)."""
        return self.keys.shape[-2]

    def get_max_cache_shape(self) -> int:
        """Return the capacity M (transformers 4.57)."""
        return self.keys.shape[-2]

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """Return (key length, key offset) for a query of that length (4.57 passes its positions)."""
        num_queries = query if isinstance(query, int) else query.shape[0]
        return self.length + num_queries, 0


class TreeCacheStateLayer(StateLayer, TreeCacheLayer):
    """A layer with attention and states."""

    def __init__(self, buffers: Sequence[torch.Tensor], num_states: int) -> None:
        TreeCacheLayer.__init__(self, *buffers)
        StateLayer.__init__(self, num_states)

    def get_max_length(self) -> int:
        """Return the capacity M."""
        return TreeCacheLayer.get_max_length(self)


class TreeCache(Cache):
    """A cache of fixed capacity for one sequence (batch size 1).

    Args:
        layer_shapes: one entry a layer; None for layers that read another layer's cache, or keep nothing.
        capacity: rows M: prompt, new tokens and one draft tree.
    """

    # Whether its rows are its own. Where all texts share them, no text can be kept for the next.
    is_lasting = True
    # Whether a pass over a draft tree is under way whose layers with states read it as one.
    is_branching = False

    def __init__(self, layer_shapes: Sequence[LayerShape | None], capacity: int) -> None:
        counts: dict[BufferShape, int] = {}
        for shape in layer_shapes:
            for part in shape.buffers if shape else ():
                counts[part] = counts.get(part, 0) + 1
        self.buffers = {
            shape: torch.zeros(
                (count, shape.num_heads, capacity, shape.head_dim),
                dtype=shape.dtype,
                device=shape.device,
            )
            for shape, count in counts.items()
        }
        free = {shape: iter(buffer.split(1)) for shape, buffer in self.buffers.items()}
        parts = [
            tuple(next(free[part]) for part in shape.buffers) if shape else None
            for shape in layer_shapes
        ]
        self._adopt(parts, capacity, [shape.num_states if shape else 0 for shape in layer_shapes])

    def _adopt(
        self,
        parts: Sequence[tuple[torch.Tensor, ...] | None],
        capacity: int,
        num_states: Sequence[int] = (),
    ) -> None:
        """Use these keys, values and index keys [1, H, M, D] as the buffers, a tuple for each layer that
        writes, and give each layer as many states.
        """
        empty = torch.empty(1, 0, capacity, 0, device="cpu")
        layers: list[Any] = []
        numbers = num_states or [0] * len(parts)
        for buffers, number in zip(parts, numbers, strict=True):
            if not number:
                layers.append(TreeCacheLayer(*(buffers or (empty, empty))))
            elif buffers:
                layers.append(TreeCacheStateLayer(buffers, number))
            else:
                layers.append(StateLayer(number))
        Cache.__init__(self, layers=layers)  # a model's own cache class takes other arguments
        self.capacity = capacity
        self._writing_layers = [layer for layer, part in zip(layers, parts, strict=True) if part]
        self._state_layers = {
            index: layer for index, layer in enumerate(layers) if isinstance(layer, StateLayer)
        }
        # Asked for at every pass.
        self._is_linear = [type(layer) is StateLayer for layer in layers]
        self._is_dummy = [not (part or number) for part, number in zip(parts, numbers, strict=True)]
        self._num_read = 0  # rows in use, where no layer writes any
        self._is_reading = False  # whether a pass is under way, or was broken off
        self._branches: Branches | None = None  # of the last pass, if it was a tree
        # States that can be taken up again, by the number of rows that they follow.
        self._marked = {0: self._states()}

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    @property
    def length(self) -> int:
        """Rows in use T."""
        if not self._writing_layers:
            return self._num_read
        length: int = self._writing_layers[0].length
        return length

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers in bytes, that of states not counted."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers.values())

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps states."""
        return bool(self._state_layers)

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer keeps states alone, without rows."""
        return self._is_linear

    @property
    def is_dummy(self) -> list[bool]:
        """Whether each layer keeps nothing of its own."""
        return self._is_dummy

    def get_seq_length(self, layer_idx: int = 0, *args: object) -> int:
        """Return the rows that this layer has in use: within a forward pass, T grows layer by layer.

        For a layer that shares another layer's cache, it is the first layer's number.
        """
        layer = self.layers[layer_idx]
        return layer.length if layer in self._writing_layers else self.length

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return (key length, key offset) for a query of this length; of the first layer that writes, if
        this one does not.
        """
        layer = self.layers[layer_idx]
        if type(layer) is StateLayer:
            layer = self._writing_layers[0]
        sizes: tuple[int, int] = layer.get_mask_sizes(query)
        return sizes

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the state of a layer of MiniMax's."""
        return self._state_layers[layer_idx].linear

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Replace the state of a layer of MiniMax's."""
        self._state_layers[layer_idx].linear = linear_cache

    @contextmanager
    def reading(self, num_rows: int) -> Iterator[None]:
        """Run a pass over this many rows in the block; if it is broken off, only marked states are whole."""
        self._is_reading = True
        yield
        self._is_reading = False
        self._num_read += num_rows

    @contextmanager
    def branching(
        self, topology: TreeTopology, mixers: Mixers, device: torch.device
    ) -> Iterator[None]:
        """Within the block layers with states read a pass as this tree; `keep` must follow."""
        tree = topology.by_level(device)
        self.is_branching = True
        with mixers.over(tree, self.layers, self.length) as branches:
            yield
        self.is_branching = False
        self._branches = branches

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Keep the first `base` rows and, after them, the rows `base + rows[i]`; forget the others.

        Args:
            base: rows that were in use before the draft tree was appended.
            rows: accepted nodes in increasing order, as `Acceptance.path`.

        Raises:
            ValueError: if states would have to go back to where `mark` was not called.
        """
        if self._state_layers:
            self._keep_states(base, rows)
        in_place = 0
        while in_place < len(rows) and rows[in_place] == in_place:
            in_place += 1
        if rows[in_place:]:
            self._move([base + row for row in rows[in_place:]], base + in_place)
        self.set_length(base + len(rows))

    def mark(self) -> None:
        """Make it possible to go back to the rows in use now; only the last mark counts."""
        if self._state_layers and self.length not in self._marked:
            self._marked = {0: self._marked[0], self.length: self._states()}

    def nearest(self, length: int) -> int:
        """Return the most rows, up to `length`, that `keep` can go back to without a draft tree."""
        if not self._state_layers:
            return length
        known = [*self._marked] if self._is_reading else [*self._marked, self.length]
        return max(number for number in known if number <= length)

    def copy_rows(self, other: TreeCache, length: int) -> None:
        """Copy the first `length` rows of a cache of the same layers; `length` as from `nearest`."""
        for shape, buffer in self.buffers.items():
            buffer[:, :, :length] = other.buffers[shape][:, :, :length]
        if self._state_layers:
            self._set_states(other._states() if length == other.length else other._marked[length])
        self.set_length(length)

    def set_length(self, length: int) -> None:
        """Say how many rows are in use, whatever they hold: states stay as they are.

        For timing, where numbers do not matter.
        """
        self._num_read = length
        self._branches = None
        for layer in self._writing_layers:
            layer.length = layer.index_length = length

    def _keep_states(self, base: int, rows: Sequence[int]) -> None:
        """Take up the states after the kept rows."""
        if self._branches is not None and rows:
            for index, layer in self._state_layers.items():
                layer.set_state(self._branches.after[index](rows[-1]))
            return
        length = base + len(rows)
        # After a tree, states are still those before it.
        num_whole = self.length if self._branches is None else self._branches.base
        if length == num_whole and not self._is_reading:
            return
        if length not in self._marked:
            raise ValueError(
                f"rows: got {length} of {self.length}; allowed: {', '.join(map(str, self._marked))}, "
                "since states cannot go back to others"
            )
        self._set_states(self._marked[length])
        self._is_reading = False
        self._marked = {known: states for known, states in self._marked.items() if known <= length}

    def _states(self) -> dict[int, State]:
        """Return a copy of the states of all layers."""
        return {index: copied(layer.state()) for index, layer in self._state_layers.items()}

    def _set_states(self, states: dict[int, State]) -> None:
        """Go on from these states."""
        for index, layer in self._state_layers.items():
            layer.set_state(copied(states[index]))

    def _move(self, rows: Sequence[int], start: int) -> None:
        """Copy rows to `start` and onward."""
        for buffer in self.buffers.values():
            kept = buffer.index_select(2, uploaded(rows, buffer.device))
            buffer[:, :, start : start + len(rows)] = kept


class OwnStatesCache(TreeCache):
    """The `TreeCache` of a model that keeps its states in a class of its own (`model.states.own_cache`).

    Args:
        layer_shapes, capacity: as `TreeCache`.
        empty: an empty cache of the model's class.
        states: those before any token, by layer and name.
    """

    def __init__(
        self,
        layer_shapes: Sequence[LayerShape | None],
        capacity: int,
        empty: Any,
        states: Mapping[int, State],
    ) -> None:
        super().__init__(layer_shapes, capacity)
        self.__dict__.update(
            {name: value for name, value in vars(empty).items() if name not in REPLACED}
        )
        for index, layer in self._state_layers.items():
            layer.set_state(copied(states[index]))
        for name in CONTAINERS:
            setattr(self, name, Container(self.layers, name))
        self._marked = {0: self._states()}

    @property
    def has_previous_state(self) -> bool:
        """Whether a token was read before; all states of a draft tree's nodes are read as if there were."""
        return self.is_branching or self._num_read > 0

    @has_previous_state.setter
    def has_previous_state(self, value: bool) -> None:
        """Do nothing: models say that they have read, which is known."""
