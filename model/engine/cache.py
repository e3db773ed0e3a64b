"""TreeCache: the KV cache of tree verification, a Hugging Face `Cache` over preallocated buffers.

A forward pass over a draft tree appends the rows of ALL nodes; `keep` then moves the accepted rows
into place and forgets the rest: O(accepted), whatever the context length. Every layer holds the
full length, sliding-window layers too (the window is in the mask), because a ring buffer cannot be
branched.

Keys and values of all layers that share a shape live in one buffer, so `keep` is one gather and one
copy.

Shapes: H key-value heads, M capacity (rows), T rows in use, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


@dataclass(frozen=True, slots=True)
class BufferShape:
    """Shape of one cached tensor (the keys or the values of one layer), without its length."""

    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key and value shapes of one layer; they differ in multi-head latent attention."""

    keys: BufferShape
    values: BufferShape


class TreeCacheLayer(CacheLayerMixin):
    """One layer's view into the buffers of a `TreeCache`."""

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, key_buffer: torch.Tensor, value_buffer: torch.Tensor) -> None:
        super().__init__()
        self.keys = key_buffer  # [1, H, M, D]
        self.values = value_buffer  # [1, H, M, D]
        self.length = 0
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


class TreeCache(Cache):
    """A cache of fixed capacity for one sequence (batch size 1).

    Args:
        layer_shapes: one entry a layer; None for layers that read another layer's cache.
        capacity: rows M: prompt, new tokens and one draft tree.
    """

    def __init__(self, layer_shapes: Sequence[LayerShape | None], capacity: int) -> None:
        counts: dict[BufferShape, int] = {}
        for shape in layer_shapes:
            for part in (shape.keys, shape.values) if shape else ():
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
        self._adopt(
            [
                (next(free[shape.keys]), next(free[shape.values])) if shape else None
                for shape in layer_shapes
            ],
            capacity,
        )

    def _adopt(
        self, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None], capacity: int
    ) -> None:
        """Use these keys and values [1, H, M, D] as the buffers, one pair for each layer that writes."""
        empty = torch.empty(1, 0, capacity, 0, device="cpu")
        super().__init__(layers=[TreeCacheLayer(*(part or (empty, empty))) for part in parts])
        self.capacity = capacity
        self._writing_layers = [
            layer for layer, part in zip(self.layers, parts, strict=True) if part
        ]

    @property
    def length(self) -> int:
        """Rows in use T."""
        length: int = self._writing_layers[0].length
        return length

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers in bytes."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers.values())

    def get_seq_length(self, layer_idx: int = 0, *args: object) -> int:
        """Return the rows that this layer has in use: within a forward pass, T grows layer by layer.

        For a layer that shares another layer's cache, it is the first layer's number.
        """
        layer = self.layers[layer_idx]
        return layer.length if layer in self._writing_layers else self.length

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Keep the first `base` rows and, after them, the rows `base + rows[i]`; forget the others.

        Args:
            base: rows that were in use before the draft tree was appended.
            rows: accepted nodes in increasing order, as `Acceptance.path`.
        """
        in_place = 0
        while in_place < len(rows) and rows[in_place] == in_place:
            in_place += 1
        if rows[in_place:]:
            self._move([base + row for row in rows[in_place:]], base + in_place)
        self._set_length(base + len(rows))

    def copy_rows(self, other: TreeCache, length: int) -> None:
        """Copy the first `length` rows of a cache of the same layers."""
        for shape, buffer in self.buffers.items():
            buffer[:, :, :length] = other.buffers[shape][:, :, :length]
        self._set_length(length)

    def _move(self, rows: Sequence[int], start: int) -> None:
        """Copy rows to `start` and onward."""
        for buffer in self.buffers.values():
            index = torch.tensor(rows, device=buffer.device)
            buffer[:, :, start : start + len(rows)] = buffer.index_select(2, index)

    def _set_length(self, length: int) -> None:
        for layer in self._writing_layers:
            layer.length = length
