"""TreeCache: the KV cache of tree verification, a Hugging Face `Cache` over preallocated buffers.

A forward pass over a draft tree appends the rows of ALL nodes; `keep` then moves the accepted rows
into place and forgets the rest: O(accepted), whatever the context length. Every layer holds the
full length, sliding-window layers too (the window is in the mask), because a ring buffer cannot be
branched.

Keys and values of all layers that share a shape live in one buffer, so `keep` is one gather and one
copy. Recurrent and convolution states of a sequence are `model.backends.states.layers`.

Shapes: H key-value heads, M capacity (rows), T rows in use, D head dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ...machine.hardware import uploaded
from ..states.layers import SequenceStates, StateLayer


@dataclass(frozen=True, slots=True)
class BufferShape:
    """Shape of one cached tensor (the keys or the values of one layer), without its length."""

    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shapes of one layer's cached tensors, and the number of its states."""

    keys: BufferShape | None  # of attention; None if there is none
    values: BufferShape | None  # other ones than the keys' in multi-head latent attention
    index_keys: BufferShape | None = None  # by which indexed attention chooses its keys
    num_states: int = 0  # recurrent or convolution states

    @property
    def buffers(self) -> tuple[BufferShape, ...]:
        """Shapes of the cached tensors that have a row for each token."""
        parts = (self.keys, self.values, self.index_keys)
        return tuple(part for part in parts if part is not None)


class MadeLayer(CacheLayerMixin):
    """Base of cache layers whose rows exist from the start.

    Attributes:
        keys, values: the rows shown, [B, H, M, D].
    """

    is_compileable = False
    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, *args: torch.Tensor) -> None:
        """Do nothing: the rows exist."""

    def get_max_length(self) -> int:
        """Return the capacity M."""
        return self.keys.shape[-2]

    def get_max_cache_shape(self) -> int:  # in transformers 4.57
        return self.get_max_length()


class TreeCacheLayer(MadeLayer):
    """One layer's view into the buffers of a `TreeCache`."""

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

    @property
    def has_rows(self) -> bool:
        """Whether it keeps rows; a layer that reads another layer's cache has buffers without heads."""
        return self.keys.shape[1] > 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows [1, H, n, D] and return views of all rows in use."""
        begin = self.claim(key_states.shape[-2])
        end = self.length
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def claim(self, num_rows: int) -> int:
        """Count more rows as in use, which the caller writes; return how many were in use.

        Raises:
            ValueError: if there is no room for them.
        """
        begin, end = self.length, self.length + num_rows
        if end > self.keys.shape[-2]:
            raise ValueError(
                f"KV cache is full: {end} rows asked for, capacity {self.keys.shape[-2]}"
            )
        self.length = end
        return begin

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
        return TreeCacheLayer.get_max_length(self)


def new_layer(
    buffers: Sequence[torch.Tensor], capacity: int, num_states: int = 0
) -> TreeCacheLayer | StateLayer:
    """Return a layer with these keys, values and index keys [1, H, M, D], if any, and this many states."""
    if num_states:
        return TreeCacheStateLayer(buffers, num_states) if buffers else StateLayer(num_states)
    empty = torch.empty(1, 0, capacity, 0, device="cpu")
    return TreeCacheLayer(*(buffers or (empty, empty)))


class TreeCache(Cache):
    """A cache of fixed capacity for one sequence (batch size 1).

    Args:
        layer_shapes: one entry a layer; None for layers that read another layer's cache, or keep nothing.
        capacity: rows M: prompt, new tokens and one draft tree.

    Attributes:
        buffers: keys and values of all layers of one shape, [layers, H, M, D].
        states: of the layers that keep some.
        has_states: whether any does.
        is_linear: whether each layer keeps states alone, without rows.
        is_dummy: whether each layer keeps nothing of its own.
    """

    # Whether its rows are its own. Where all sequences share them, no sequence can be kept for the next.
    is_lasting = True
    # Asked for at every pass: values of the instance, in place of transformers' properties.
    is_linear: Sequence[bool] = ()
    is_dummy: Sequence[bool] = ()

    def __init__(self, layer_shapes: Sequence[LayerShape | None], capacity: int) -> None:
        counts = Counter(part for shape in layer_shapes if shape for part in shape.buffers)
        self.buffers = {
            shape: torch.zeros(
                (count, shape.num_heads, capacity, shape.head_dim),
                dtype=shape.dtype,
                device=shape.device,
            )
            for shape, count in counts.items()
        }
        free = {shape: iter(buffer.split(1)) for shape, buffer in self.buffers.items()}
        self._use_layers(
            [
                new_layer([next(free[part]) for part in shape.buffers], capacity, shape.num_states)
                if shape
                else new_layer((), capacity)
                for shape in layer_shapes
            ],
            capacity,
        )

    def _use_layers(self, layers: Sequence[Any], capacity: int) -> None:
        """Become a cache of these layers, from `new_layer`."""
        Cache.__init__(self, layers=list(layers))  # a model's own cache class takes other arguments
        self.capacity = capacity
        self.states = SequenceStates(layers)
        self.has_states = bool(self.states)
        self.is_linear = [type(layer) is StateLayer for layer in layers]
        self._writing_layers = [layer for layer in layers if getattr(layer, "has_rows", False)]
        self.is_dummy = [
            not isinstance(layer, StateLayer) and not layer.has_rows for layer in layers
        ]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def length(self) -> int:
        """Rows in use T."""
        if not self._writing_layers:
            return self.states.num_read
        length: int = self._writing_layers[0].length
        return length

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers in bytes, without that of states."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

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

    def plain_layer(self, layer_idx: int) -> TreeCacheLayer | None:
        """Return a layer whose rows may be written without `update`; None for layers of other kinds."""
        layer = self.layers[layer_idx]
        return layer if type(layer) is TreeCacheLayer else None

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Keep the first `base` rows and, after them, the rows `base + rows[i]`; forget the others.

        Args:
            base: rows that were in use before the draft tree was appended.
            rows: accepted nodes in increasing order, as `Acceptance.path`.

        Raises:
            ValueError: if states would have to go back to where `mark` was not called.
        """
        if self.has_states:
            self.states.keep(base, rows, self.length)
        in_place = 0
        while in_place < len(rows) and rows[in_place] == in_place:
            in_place += 1
        if rows[in_place:]:
            self._move([base + row for row in rows[in_place:]], base + in_place)
        self.set_length(base + len(rows))

    def mark(self) -> None:
        """Make it possible to go back to the rows in use now; only the last mark counts."""
        self.states.mark(self.length)

    def nearest(self, length: int) -> int:
        """Return the most rows, up to `length`, that `keep` can go back to without a draft tree."""
        return self.states.nearest(length, self.length)

    def copy_rows(self, other: TreeCache, length: int) -> None:
        """Copy the first `length` rows of a cache of the same layers; `length` as from `nearest`."""
        for shape, buffer in self.buffers.items():
            buffer[:, :, :length] = other.buffers[shape][:, :, :length]
        self.states.take_from(other.states, length, other.length)
        self.set_length(length)

    def set_length(self, length: int) -> None:
        """State how many rows are in use, whatever they hold: states stay as they are.

        For timing, where numbers do not matter.
        """
        if self.has_states:
            self.states.set_length(length)
        for layer in self._writing_layers:
            layer.length = layer.index_length = length

    def _move(self, rows: Sequence[int], start: int) -> None:
        for buffer in self.buffers.values():
            kept = buffer.index_select(2, uploaded(rows, buffer.device))
            buffer[:, :, start : start + len(rows)] = kept
