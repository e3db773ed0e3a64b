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
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..machine.own_forwards import OwnForwards
from .operations import few_rows
from .packed import packed_weights
from .pass_kernels import PassKernels
from .short_pass import DTYPES, has_bfloat16_units, short_pass_kernel

# Smaller models spend their time elsewhere.
FEWEST_WEIGHTS = 2**20
# Most rows in bfloat16 for which the kernel is as fast as torch's with vector units for it (the table),
# and with AMX's matrix units: an estimate, since no machine with AMX was at hand.
MOST_ROWS_WITH_VECTORS, MOST_ROWS_WITH_MATRICES = 96, 32

Forward = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


class LinearKernels(PassKernels):
    """The kernel of a model's linear layers.

    Args:
        layers: the layers that use it, of one dtype.
        most_rows: largest number of rows for which they use it.
        forward: the function that computes a layer.
        packed: weights of layers that compute by the kernel themselves (`packed.py`).
    """

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        most_rows: int = sys.maxsize,
        forward: Forward = few_rows,
        packed: Sequence[torch.Tensor] = (),
    ) -> None:
        has_exact = any(is_exact(layer.weight.dtype) for layer in layers)
        # The bytes of their blocks: passes over fewer bits cost less.
        of_packed = [f"packed-{size}" for size in sorted({one.shape[2] for one in packed})]
        names = [*(["few-rows"] if layers else []), *of_packed]
        super().__init__("+".join(names) or "as-they-are", not has_exact)
        self._packed = tuple(packed)
        # Methods: a deep copy of the model gets functions of its own layers.
        self._forwards = OwnForwards({layer: MethodType(forward, layer) for layer in layers})
        self._most_rows, self._forward = most_rows, forward

    def __iter__(self) -> Iterator[Any]:
        """The layers."""
        return iter(self._forwards)

    def without(self, modules: Container[nn.Module]) -> LinearKernels:
        """Return the kernels of those layers that are not among these modules."""
        layers = [layer for layer in self if layer not in modules]
        return LinearKernels(layers, self._most_rows, self._forward, self._packed)

    def __bool__(self) -> bool:
        return bool(self._forwards or self._packed)

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights that the kernel reads, packed ones included."""
        return [*(layer.weight for layer in self), *self._packed]

    def for_rows(self, num_rows: int) -> OwnForwards:
        """Return the functions of a pass over `num_rows` rows."""
        is_used = num_rows <= self._most_rows and not self._is_off
        return self._forwards if is_used else OwnForwards({})

    def is_reference(self, num_rows: int) -> bool:
        """Whether a prompt of this length, or a single row, has reference arithmetic as it is."""
        return self._is_plain or num_rows > self._most_rows


def linear_kernels(model: nn.Module, dtype: torch.dtype) -> LinearKernels:
    """Return the kernels of a model's linear layers on this machine."""
    layers = suitable_layers(model)
    packed = packed_weights(model)
    num_weights = sum(layer.weight.numel() for layer in layers)
    if num_weights < FEWEST_WEIGHTS or dtype not in DTYPES or not short_pass_kernel():
        layers = []
    return LinearKernels(layers, most_rows(dtype), packed=packed)


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
