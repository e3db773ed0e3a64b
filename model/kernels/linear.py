"""Linear layers of a draft: the same weights, computed by the fastest kernel for a few rows.

A pass over a draft multiplies a few rows with every weight matrix. On a CPU torch's kernels for
that are far below what memory and cores allow: in float32 eight rows of a layer take two or three
times as long as one, and in bfloat16 the weights are rearranged at every call, or, without AVX-512,
eight rows take eight times as long as one. Our own kernel reads each weight once, as it is;
oneDNN's reads a copy that is rearranged once. The fastest one depends on layer, number of rows,
dtype and machine, so it is measured once and kept on disk.

The model stays unchanged: its layers use other kernels only within `for_rows`. Sums may differ by
rounding, as in any pass over several rows. In float32 near-ties are decided with the original
layers (`reference`). In half precision near-ties may fall either way, for all methods alike.

Shapes: n rows, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

# Measured numbers of rows; a pass counts as the next larger one, a longer pass as the last.
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 512)
# Packed weights are laid out for this many rows; the layout works for other numbers too.
PACKED_ROWS = 8
# Weights compared to find out whether a layer was changed.
SAMPLE = 64

Forward = Callable[[torch.Tensor], torch.Tensor]
Size = tuple[int, int]  # (O, I)
Chosen = Mapping[Size, Mapping[int, "Kernel"]]


def packed(layer: nn.Linear) -> Forward:
    """Return the layer's function on weights in oneDNN's blocks.

    Without blocks for half precision the weights are float32, and results are rounded once.
    """
    weight, bias = layer.weight.detach(), layer.bias
    dtype = weight.dtype
    run = torch.ops.mkldnn._linear_pointwise.default
    if has_blocks(dtype):
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        return lambda rows: run(rows, blocks, bias, "none", [], "")
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight.float(), PACKED_ROWS)
    wide_bias = None if bias is None else bias.detach().float()
    return lambda rows: run(rows.float(), blocks, wide_bias, "none", [], "").to(dtype)


@cache
def has_blocks(dtype: torch.dtype) -> bool:
    """Whether oneDNN has blocks of this dtype on this processor."""
    zeros = torch.zeros(16, 16, dtype=dtype, device="cpu")
    try:
        blocks = torch.ops.mkldnn._reorder_linear_weight(zeros, PACKED_ROWS)
        torch.ops.mkldnn._linear_pointwise(zeros, blocks, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True


def few_rows(layer: nn.Linear) -> Forward:
    """Return the layer's function by the kernel for a few rows; it reads the current weights at each call."""
    run = torch.ops.token_recycling.few_rows.default
    return lambda rows: run(rows, layer.weight, layer.bias)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to compute a linear layer.

    Attributes:
        name: its name on disk.
        made: function that makes a layer's function.
        is_copy: whether the function reads a copy of the weights.
    """

    name: str
    made: Callable[[nn.Linear], Forward]
    is_copy: bool


FEW_ROWS = Kernel("few-rows", few_rows, is_copy=False)
PACKED = Kernel("packed", packed, is_copy=True)
# In order of preference for kernels that are about equally fast.
KERNELS = {kernel.name: kernel for kernel in (FEW_ROWS, PACKED)}


class _Function:
    """A layer's function by another kernel."""

    def __init__(self, layer: nn.Linear, kernel: Kernel) -> None:
        self.layer = layer
        self._kernel = kernel
        self._make()

    def refresh(self) -> None:
        """Copy the weights again if they are a copy and have changed since."""
        if self._made_for() is not self.layer:
            self._make()  # the model was deep-copied: the function is still the original's
        if not self._kernel.is_copy:
            return
        *now, sample = self._signature()
        *then, old_sample = self._made_of
        if now != then or not torch.equal(sample, old_sample):
            self._make()

    def _make(self) -> None:
        self.forward = self._kernel.made(self.layer)
        self._made_for = weakref.ref(self.layer)
        self._made_of = self._signature() if self._kernel.is_copy else ()

    def _signature(self) -> tuple[Any, ...]:
        weight, bias = self.layer.weight.detach(), self.layer.bias
        # Writes through `.data`, as when adapters are merged, are not counted by torch: a sample shows them.
        sample = weight.flatten()[:: max(1, weight.numel() // SAMPLE)].clone()
        version = 0 if self.layer.weight.is_inference() else self.layer.weight._version
        return weight.data_ptr(), version, bias is None or bias.data_ptr(), sample


class LinearKernels:
    """The kernels of a model's linear layers.

    Args:
        layers: the model's layers, from `model.kernels.choice`.
        chosen: by layer size, the kernel for each number in `ROWS` that uses one; others use the original layer.
        is_compiled: whether passes are compiled. These round in their own way, so prompts and
            single rows count as reference with any kernel.

    Attributes:
        name: names of the kernels in use.
    """

    def __init__(
        self, layers: Sequence[nn.Linear], chosen: Chosen, is_compiled: bool = False
    ) -> None:
        self._functions: list[_Function] = []
        self._used: dict[int, list[_Function]] = {n: [] for n in ROWS}
        names = set()
        for layer in layers:
            by_rows = chosen.get(size_of(layer), {})
            functions = {kernel: _Function(layer, kernel) for kernel in set(by_rows.values())}
            self._functions += functions.values()
            for n, kernel in by_rows.items():
                self._used[n].append(functions[kernel])
            names |= {kernel.name for kernel in functions}
        self.name = "+".join(sorted(names)) or "as-they-are"
        self._is_off = False
        self._is_compiled = is_compiled
        self._not_reference = {
            n
            for n, functions in self._used.items()
            if any(is_exact(function.layer.weight.dtype) for function in functions)
        }

    def __bool__(self) -> bool:
        """Whether any layer uses a kernel."""
        return bool(self._functions)

    def for_rows(self, num_rows: int) -> AbstractContextManager[None]:
        """Return the block to run a pass over `num_rows` rows in."""
        functions = self._used[_measured(num_rows)]
        return _exchanged(functions) if functions and not self._is_off else nullcontext()

    def is_reference(self, num_rows: int) -> bool:
        """Whether a prompt of this length, or a single row, has reference arithmetic as it is."""
        return self._is_compiled or _measured(num_rows) not in self._not_reference

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block prompts and single rows have reference arithmetic: plain decoding's, bit for bit."""
        self._is_off = not self._is_compiled
        try:
            yield
        finally:
            self._is_off = False

    def refresh(self) -> None:
        """Copy changed weights again, for example after merging an adapter.

        A write to single numbers through `weight.data` may be missed.
        """
        for function in self._functions:
            function.refresh()


def _measured(num_rows: int) -> int:
    """Return the number in `ROWS` that stands for a pass of this size."""
    return ROWS[min(bisect_left(ROWS, num_rows), len(ROWS) - 1)]


@contextmanager
def _exchanged(functions: Sequence[_Function]) -> Iterator[None]:
    """Within the block layers compute with these functions."""
    # Bypasses `nn.Module.__setattr__`, which takes longer than a small layer.
    for function in functions:
        function.layer.__dict__["forward"] = function.forward
    try:
        yield
    finally:
        for function in functions:
            del function.layer.__dict__["forward"]


def is_exact(dtype: torch.dtype) -> bool:
    """Whether near-ties in this dtype are decided by reference arithmetic.

    Not in half precision: its noise is as large as common differences, so most of the text would be
    decoded twice.
    """
    return dtype.itemsize >= 4


def size_of(layer: nn.Linear) -> Size:
    """Return (O, I) of a layer."""
    outputs, inputs = layer.weight.shape
    return outputs, inputs
