"""Layers whose weights stay in blocks of a few bits, as a GGUF file or torchao has them.

The kernel for a few rows unpacks the blocks as it multiplies (`packed_weights.h`), so a pass reads only their
bytes. Its products have the bits of the same kernel's with the unpacked weights: in float32, or, for rows in
bfloat16 on a processor with units for it, in bfloat16. A row has the same bits beside any others. The layers'
own forward is that kernel, for prompts too: a model of them is a stock model, and all that runs it computes
alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .short_pass import short_pass_kernel

# Numbers and bytes of a block, by the name of its type in llama.cpp.
TYPES = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
# Of torchao's numbers: a scale in float32, then whole numbers of eight bits.
INT8 = (32, 36)
NUMBERS = {size: numbers for numbers, size in (*TYPES.values(), INT8)}


class _Packed(nn.Module):
    """The blocks of a weight; a `state_dict` has the unpacked one, under the usual name.

    Args:
        blocks: [O, blocks of a row, bytes of a block], uint8.
        dtype: of the unpacked weight.

    Raises:
        RuntimeError: if the kernel is not available.
    """

    blocks: torch.Tensor

    def __init__(self, blocks: torch.Tensor, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        if not short_pass_kernel():
            raise RuntimeError("packed weights need their kernel, which is not available here")
        self.register_buffer("blocks", blocks, persistent=False)
        # Follows the model when it is cast.
        self.register_buffer("_like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        rows, count, size = self.blocks.shape
        return rows, count * NUMBERS[size]

    @property
    def weight(self) -> torch.Tensor:
        """The whole weight, unpacked anew at each call."""
        return self._unpacked(self.blocks)

    def _unpacked(self, blocks: torch.Tensor) -> torch.Tensor:
        numbers: torch.Tensor = torch.ops.token_recycling.unpacked(blocks, self._like.dtype)
        return numbers

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}, blocks of {self.blocks.shape[2]} bytes"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        *_, errors = others
        errors.append(
            f"{prefix}weight: its weights are packed and cannot be replaced; allowed: a model that was loaded "
            "with dequantised weights"
        )


class PackedLinear(_Packed, nn.Linear):  # type: ignore[override]
    """A linear layer with packed weights.

    Args:
        blocks, dtype: as `_Packed`.
        bias: [O] or None.
    """

    def __init__(
        self, blocks: torch.Tensor, dtype: torch.dtype, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__(blocks, dtype)
        self.out_features, self.in_features = self.shape
        self.register_parameter("bias", bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = torch.ops.token_recycling.few_rows(rows, self.blocks, self.bias)
        return outputs


class PackedEmbedding(_Packed, nn.Embedding):  # type: ignore[override]
    """An embedding with packed weights; only the rows that are asked for are unpacked."""

    def __init__(self, blocks: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(blocks, dtype)
        self.num_embeddings, self.embedding_dim = self.shape
        self.padding_idx = self.max_norm = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._unpacked(self.blocks[ids.reshape(-1)])
        return rows.reshape(*ids.shape, self.embedding_dim)


def packed_weights(model: nn.Module) -> list[torch.Tensor]:
    """Return the blocks of a model's packed layers, those of tied layers once."""
    packed = (module for module in model.modules() if isinstance(module, _Packed))
    return [*{id(module.blocks): module.blocks for module in packed}.values()]


def num_weights(model: nn.Module) -> int:
    """Return the number of weights of a model or layer, packed or not."""
    packed = sum(len(one) * one.shape[1] * NUMBERS[one.shape[2]] for one in packed_weights(model))
    return packed + sum(parameter.numel() for parameter in model.parameters())


def stored(module: Any) -> torch.Tensor:
    """Return the tensor that holds a layer's weight, packed or not: it has the weight's rows and its device."""
    weight: torch.Tensor = module.blocks if isinstance(module, _Packed) else module.weight
    return weight
