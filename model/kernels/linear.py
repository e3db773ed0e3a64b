"""Linear layers of a pass: the same weights, by our kernel for a few rows.

A pass over a draft multiplies a few rows with every weight matrix. On a CPU torch's kernels for
that are far below what memory and cores allow: in float32 eight rows of a layer take two or three
times as long as one, and in bfloat16 the weights are rearranged at every call, or, without AVX-512,
eight rows take eight times as long as one. Our own kernel (`short_pass`) reads each weight once, as
it is.

A fixed rule (`most_rows`) says which passes use it. It is not measured on the machine: a choice measured
while other work runs stays wrong. Time of torch's kernel / ours, median of nine layers of the
demo model and of SmolLM2-135M, one thread:

| rows | 1 | 8 | 32 | 64 | 81 | 96 | 256 |
|---|---|---|---|---|---|---|---|
| Zen 5, float32 | 1.9 | 5.2 | 2.2 | 2.0 | 2.1 | 2.0 | 1.9 |
| Zen 5, bfloat16 | 3.4 | 3.0 | 1.3 | 1.0 | 1.1 | 1.0 | 0.9 |
| with AVX2 alone, float32 | 3.6 | 5.5 | 1.5 | 1.2 | 1.2 | 1.2 | 1.1 |
| with AVX2 alone, bfloat16 | 1.6 | 3.4 | 4.5 | 6.9 | 4.6 | 7.9 | 7.3 |

The model stays unchanged: its layers use the kernel only within `for_rows`. Sums may differ by
rounding, as in any pass over several rows. In float32 near-ties are decided with the original
layers (`reference`). In half precision near-ties may fall either way, for all methods alike.

Weights may stay in blocks of a few bits, as a GGUF file or torchao has them (`QuantisedLinear`). The kernel
dequantises the blocks as it multiplies (`quantised_weights.h`), so a pass reads only their bytes. Its products have
the bits of the same kernel's with the dequantised weights: in float32, or, for rows in bfloat16 on a processor with
units for it, in bfloat16. A row has the same bits beside any others. The layers' own forward is that kernel, for
prompts too: a model of them is a stock model, and all that runs it computes alike.

After `multiply_whole` the layers are another model: rows are rounded to eight bits, and products summed as whole
numbers (`whole_products.h`), as llama.cpp does. Their weights are repacked for it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..machine.own_forwards import OwnForwards
from .operations import few_rows
from .short_pass import DTYPES, has_bfloat16_units, short_pass_kernel

# Numbers and bytes of a block, by the name of its type in llama.cpp.
TYPES = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
# Of torchao's numbers: a scale in float32, then whole numbers of eight bits.
INT8 = (32, 36)
NUMBERS = {size: numbers for numbers, size in (*TYPES.values(), INT8)}
# Of repacked weights: numbers of a part, and rows side by side.
PART, SIDE = 32, 16
# What rounding to a whole number of eight bits changes, as a share of the largest number: a difference in the last
# bit of an input can become as much.
WHOLE_STEP = 2.0**-7


class _Quantised(nn.Module):
    """The blocks of a weight; a `state_dict` has the dequantised one, under the usual name.

    Args:
        blocks: [O, blocks of a row, bytes of a block], uint8; int8 once they are repacked for whole numbers.
        dtype: of the dequantised weight.

    Raises:
        RuntimeError: if the kernel is not available.
    """

    blocks: torch.Tensor

    def __init__(self, blocks: torch.Tensor, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        if not short_pass_kernel():
            raise RuntimeError("quantised weights need their kernel, which is not available here")
        self.register_buffer("blocks", blocks, persistent=False)
        # Follows the model when it is cast.
        self.register_buffer("_like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return _shape(self.blocks)

    @property
    def weight(self) -> torch.Tensor:
        """The whole weight, dequantised anew at each call."""
        return self._dequantised(self.blocks)

    def _dequantised(self, blocks: torch.Tensor) -> torch.Tensor:
        numbers: torch.Tensor = torch.ops.token_recycling.dequantised(blocks, self._like.dtype)
        return numbers

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}, blocks of {self.blocks.shape[2]} bytes"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        *_, errors = others
        errors.append(
            f"{prefix}weight: its weights are quantised and cannot be replaced; allowed: a model that was loaded "
            "with dequantised weights"
        )


class QuantisedLinear(_Quantised, nn.Linear):  # type: ignore[override]
    """A linear layer with quantised weights.

    Args:
        blocks, dtype: as `_Quantised`.
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


class QuantisedEmbedding(_Quantised, nn.Embedding):  # type: ignore[override]
    """An embedding with quantised weights; only the rows that are asked for are dequantised.

    Args:
        blocks, dtype: as `_Quantised`.
        scale: what its rows are multiplied by, as Gemma's are.
    """

    def __init__(
        self, blocks: torch.Tensor, dtype: torch.dtype, scale: float | None = None
    ) -> None:
        super().__init__(blocks, dtype)
        self._scale = scale
        self.num_embeddings, self.embedding_dim = self.shape
        self.padding_idx = self.max_norm = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._dequantised(self.blocks[ids.reshape(-1)])
        if self._scale is not None:
            rows *= torch.tensor(self._scale, dtype=rows.dtype)
        return rows.reshape(*ids.shape, self.embedding_dim)


def quantised_weights(model: nn.Module) -> list[torch.Tensor]:
    """Return the blocks of a model's quantised layers, those of tied layers once."""
    quantised = (module for module in model.modules() if isinstance(module, _Quantised))
    return [*{id(module.blocks): module.blocks for module in quantised}.values()]


def _shape(blocks: torch.Tensor) -> tuple[int, int]:
    rows, count, size = blocks.shape
    return rows, count * (PART if is_whole(blocks) else NUMBERS[size])


def is_whole(weight: torch.Tensor) -> bool:
    """Whether a weight is multiplied in whole numbers of eight bits."""
    return weight.dtype == torch.int8 and weight.dim() == 3


def multiply_whole(model: nn.Module) -> None:
    """Let a model's quantised layers with a multiple of 16 outputs multiply in whole numbers of eight bits. A head
    that was tied to the embedding then has weights of its own.
    """
    repacked: dict[int, torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, QuantisedLinear) and module.out_features % SIDE == 0:
            blocks = module.blocks
            if id(blocks) not in repacked:
                repacked[id(blocks)] = torch.ops.token_recycling.packed(blocks)
            module.blocks = repacked[id(blocks)]


def num_weights(model: nn.Module) -> int:
    """Return the number of weights of a model or layer, quantised or not."""
    quantised = sum(math.prod(_shape(one)) for one in quantised_weights(model))
    return quantised + sum(parameter.numel() for parameter in model.parameters())


def stored(module: Any) -> torch.Tensor:
    """Return the tensor that holds a layer's weight, quantised or not: it has the weight's rows and its device."""
    weight: torch.Tensor = module.blocks if isinstance(module, _Quantised) else module.weight
    return weight


# Smaller models spend their time elsewhere.
FEWEST_WEIGHTS = 2**20
# Most rows in bfloat16 for which the kernel is as fast as torch's with vector units for it (the table),
# and with AMX's matrix units: an estimate, since no machine with AMX was at hand.
MOST_ROWS_WITH_VECTORS, MOST_ROWS_WITH_MATRICES = 96, 32

Forward = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


class LinearKernels:
    """The kernel of a model's linear layers.

    Args:
        layers: the layers that use it, of one dtype.
        most_rows: largest number of rows for which they use it.
        forward: the function that computes a layer.
        quantised: weights of layers that compute by the kernel themselves (`quantised.py`).
    """

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        most_rows: int = sys.maxsize,
        forward: Forward = few_rows,
        quantised: Sequence[torch.Tensor] = (),
    ) -> None:
        has_exact = any(is_exact(layer.weight.dtype) for layer in layers)
        # The bytes of their blocks: passes over fewer bits cost less.
        kinds = sorted({(one.shape[2], is_whole(one)) for one in quantised})
        of_quantised = [f"packed-{size}{'-int8' * whole}" for size, whole in kinds]
        names = [*(["few-rows"] if layers else []), *of_quantised]
        self.name = "+".join(names) or "as-they-are"
        self.is_plain = not has_exact
        self._quantised = tuple(quantised)
        # Methods: a deep copy of the model gets functions of its own layers.
        self._forwards = OwnForwards({layer: MethodType(forward, layer) for layer in layers})
        self._most_rows, self._forward = most_rows, forward

    def __iter__(self) -> Iterator[Any]:
        """The layers."""
        return iter(self._forwards)

    def without(self, modules: Container[nn.Module]) -> LinearKernels:
        """Return the kernels of those layers that are not among these modules."""
        layers = [layer for layer in self if layer not in modules]
        return LinearKernels(layers, self._most_rows, self._forward, self._quantised)

    def __bool__(self) -> bool:
        return bool(self._forwards or self._quantised)

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights that the kernel reads, quantised ones included."""
        return [*(layer.weight for layer in self), *self._quantised]

    def for_rows(self, num_rows: int, in_reference: bool = False) -> OwnForwards:
        """Return the functions of a pass over `num_rows` rows; in reference arithmetic those of plain decoding."""
        is_used = num_rows <= self._most_rows and (self.is_plain or not in_reference)
        return self._forwards if is_used else OwnForwards({})

    def is_reference(self, num_rows: int) -> bool:
        """Whether a prompt of this length, or a single row, has reference arithmetic as it is."""
        return self.is_plain or num_rows > self._most_rows


def linear_kernels(model: nn.Module, dtype: torch.dtype) -> LinearKernels:
    """Return the kernels of a model's linear layers on this machine."""
    layers = suitable_layers(model)
    quantised = quantised_weights(model)
    num_weights = sum(layer.weight.numel() for layer in layers)
    if num_weights < FEWEST_WEIGHTS or dtype not in DTYPES or not short_pass_kernel():
        layers = []
    return LinearKernels(layers, most_rows(dtype), quantised=quantised)


def most_rows(dtype: torch.dtype) -> int:
    """Return the largest number of rows for which the kernel is used."""
    if dtype != torch.bfloat16 or not has_bfloat16_units():
        return sys.maxsize
    has_matrices = torch.cpu._is_amx_tile_supported()
    return MOST_ROWS_WITH_MATRICES if has_matrices else MOST_ROWS_WITH_VECTORS


def suitable_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers that may use the kernel: `nn.Linear` with ordinary weights on the CPU, uncompiled."""
    if hasattr(model, "_orig_mod"):
        return []
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    return [layer for layer in layers if _is_plain(layer)]


def _is_plain(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        "forward" not in layer.__dict__  # such as accelerate's, which moves weights
        and type(weight) in (nn.Parameter, torch.Tensor)
        and weight.device.type == "cpu"
        and weight.is_floating_point()
        and weight.is_contiguous()
    )


def is_exact(dtype: torch.dtype) -> bool:
    """Whether near-ties in this dtype are decided by reference arithmetic.

    Not in half precision: its noise is as large as common differences, so most of the text would be
    decoded twice.
    """
    return dtype.itemsize >= 4
