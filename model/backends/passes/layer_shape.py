"""Shapes of the tensors that a layer caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
