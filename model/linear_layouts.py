"""Linear layers of a draft: the same weights in the layout that a pass over few rows reads fastest.

A pass over a draft multiplies a handful of rows with every weight matrix. On a CPU torch's kernels
for that stay far below what memory and cores allow: in float32 eight rows of a layer cost two or
three times as much as one, and in bfloat16 the weights are rearranged at every call, or, without
AVX-512, eight rows cost eight times as much as one. A copy that is rearranged once does better. Which
layout wins depends on the layer, the number of rows, the dtype and the machine, so it is measured,
once, and kept on disk. In compiled passes the compiler makes the kernels for a few rows itself, from the
weights as they are.

The model stays as it is: its layers compute with the copies within `for_rows` and `for_prompt` alone.
Sums may differ by rounding, as those of any pass over several rows do. Single rows and the prompt are
plain decoding. In float32 single rows may use a copy, since decoding decides near-ties with the layers
as they are (`plainly`), and the prompt never does; in half precision single rows use one to the same
bits only, and the prompt, which all methods read alike, any.

Shapes: n rows, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear

from model.measured import machine_key, read_measured, write_measured
from model.verification import decides_near_ties

if TYPE_CHECKING:
    from model.hf import TargetModel

# Numbers of rows that are measured; a pass counts as the next of them.
ROWS = (1, 2, 4, 8, 16, 32, 64, 96)
PROMPT_ROWS = 128  # of the pass that stands for prompts, and for longer drafts
USUAL_ROWS = (1, 4, 8, 16)
# A smaller model spends its time elsewhere.
FEWEST_WEIGHTS = 2**20
# Rows that packed weights are laid out for; the layout serves other numbers of rows as well.
PACKED_ROWS = 8
# Rows up to which dot products are faster than a library's matrix product, compiled (AVX2, float32: 8
# rows of MLP layers of the demo model's size in 0.4 of the time, 16 in 0.85, 32 in 1.05).
MOST_DOT_ROWS = 8
# Share of a layer's time that a copy must save.
WORTHWHILE = 0.05
NUM_TIMES = 3
ENOUGH_SECONDS = 0.3  # of timing one layout, after which it is not repeated
# Weights below which a model may fit the processor's cache, originals or copies, but hardly both.
SMALL = 2**24
# Weights that are read in turn while a layer is timed, since in a pass each layer's come from memory.
TIMED_BYTES = 2**25
# Share of the free memory that copies may take.
MEMORY_SHARE = 0.5
# Weights compared to find out whether a layer was changed.
SAMPLE = 64

Forward = Callable[[torch.Tensor], torch.Tensor]
Size = tuple[int, int]  # (O, I)


def packed(layer: nn.Linear) -> Forward:
    """Return the layer's function on weights in oneDNN's blocks: of float32, where it has none for half
    precision, with results rounded once.
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
    """Whether oneDNN computes with blocks of this dtype on this processor."""
    zeros = torch.zeros(16, 16, dtype=dtype)
    try:
        blocks = torch.ops.mkldnn._reorder_linear_weight(zeros, PACKED_ROWS)
        torch.ops.mkldnn._linear_pointwise(zeros, blocks, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True


def dot_products(layer: nn.Linear) -> Forward:
    """Return the layer's function on a few rows as dot products, which a compiler makes one loop of that
    reads every weight once.
    """

    def forward(rows: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.weight, layer.bias
        if rows.shape[:-1].numel() > MOST_DOT_ROWS:
            return linear(rows, weight, bias)
        flat = rows.reshape(-1, rows.shape[-1]).contiguous()  # [n, I]
        # Compilers work out an input again for every output, such as an MLP's activation, unless its
        # place in memory matters.
        flat = flat.as_strided(flat.shape, flat.stride())
        wide = torch.promote_types(rows.dtype, torch.float32)
        # Two sums at a time hide how long an addition takes.  [O, n / 2] each
        sums = [
            (weight.to(wide)[:, None] * part.to(wide)[None]).sum(dim=2) for part in flat.chunk(2)
        ]
        outputs = torch.cat(sums, dim=1).t()  # [n, O]
        if bias is not None:
            outputs = outputs + bias.to(wide)
        return outputs.to(rows.dtype).reshape(*rows.shape[:-1], -1)

    return forward


@dataclass(frozen=True, slots=True)
class Layout:
    """An arrangement of weights.

    Attributes:
        name: its name on disk.
        copied: makes a layer's function on weights in it.
        is_compiled: whether it is for compiled passes, which round in their own way: their single rows
            are plain decoding whatever the layout, and the weights stay where they are.
    """

    name: str
    copied: Callable[[nn.Linear], Forward]
    is_compiled: bool


PACKED = Layout("packed", packed, is_compiled=False)
DOT_PRODUCTS = Layout("dot-products", dot_products, is_compiled=True)


class _Copy:
    """A layer's weights in another layout.

    Attributes:
        rows: for which of `ROWS` and `PROMPT_ROWS` the copy is used.
    """

    def __init__(self, layer: nn.Linear, layout: Layout, rows: Collection[int]) -> None:
        self.layer = layer
        self.rows = rows
        self._layout = layout
        self.make()

    def make(self) -> None:
        """Copy the weights as they are now."""
        self.forward = self._layout.copied(self.layer)
        self._made_of = self._signature()

    @property
    def is_current(self) -> bool:
        """Whether the layer still holds the weights that were copied."""
        *now, sample = self._signature()
        *then, old_sample = self._made_of
        return now == then and torch.equal(sample, old_sample)

    def _signature(self) -> tuple[Any, ...]:
        weight, bias = self.layer.weight.detach(), self.layer.bias
        # Changes through `.data`, as adapters are merged, are not counted: a sample shows them.
        sample = weight.flatten()[:: max(1, weight.numel() // SAMPLE)].clone()
        version = 0 if self.layer.weight.is_inference() else self.layer.weight._version
        return weight.data_ptr(), version, bias is None or bias.data_ptr(), sample


class LinearLayouts:
    """The copies of a model's linear layers.

    Args:
        layout: of the copies.
        layers: of the model, see `suitable_layers`.
        rows: for which of `ROWS` and `PROMPT_ROWS` layers use copies, by their size; others stay as they
            are.

    Attributes:
        single_rows_are_plain: whether a pass over one row is plain decoding, bit for bit.
    """

    def __init__(
        self, layout: Layout, layers: Sequence[nn.Linear], rows: Mapping[Size, Collection[int]]
    ) -> None:
        self._copies = [
            _Copy(layer, layout, rows[size_of(layer)])
            for layer in layers
            if rows.get(size_of(layer))
        ]
        self._used = {
            n: [copy for copy in self._copies if n in copy.rows] for n in (*ROWS, PROMPT_ROWS)
        }
        self._is_off = False
        self._is_compiled = layout.is_compiled
        self.single_rows_are_plain = layout.is_compiled or not any(
            decides_near_ties(copy.layer.weight.dtype) for copy in self._used[1]
        )

    def __bool__(self) -> bool:
        """Whether any layer has a copy."""
        return bool(self._copies)

    def for_rows(self, num_rows: int) -> AbstractContextManager[None]:
        """Return the block to run a pass over `num_rows` rows in."""
        if self._is_off:
            return nullcontext()
        if num_rows > ROWS[-1]:
            return self.for_prompt()
        return _computing_with(self._used[ROWS[bisect_left(ROWS, num_rows)]])

    def for_prompt(self) -> AbstractContextManager[None]:
        """Return the block to read a prompt in."""
        return _computing_with(self._used[PROMPT_ROWS])

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Within the block single rows are plain decoding, bit for bit."""
        self._is_off = not self.single_rows_are_plain
        try:
            yield
        finally:
            self._is_off = False

    def refresh(self) -> None:
        """Copy again what has changed since, such as by merging an adapter.

        A change through `weight.data` of single numbers, one that moves nothing else, may be missed.
        """
        for copy in () if self._is_compiled else self._copies:
            if not copy.is_current:
                copy.make()


def _computing_with(copies: Sequence[_Copy]) -> AbstractContextManager[None]:
    """Return the block in which layers compute with their copies."""
    return _exchanged(copies) if copies else nullcontext()


@contextmanager
def _exchanged(copies: Sequence[_Copy]) -> Iterator[None]:
    # Past `nn.Module.__setattr__`, which takes longer than a small layer.
    for copy in copies:
        copy.layer.__dict__["forward"] = copy.forward
    try:
        yield
    finally:
        for copy in copies:
            del copy.layer.__dict__["forward"]


def size_of(layer: nn.Linear) -> Size:
    """Return (O, I) of a layer."""
    outputs, inputs = layer.weight.shape
    return outputs, inputs


def suitable_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that may compute with copies: plain ones, on the CPU, with plain weights,
    of a model that is not compiled.
    """
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


def linear_layouts(target: TargetModel) -> LinearLayouts:
    """Return the copies that a target model's passes are fastest with on this machine: measured once,
    then read from disk. There are none where they do not fit into memory.
    """
    layout, layers = target.layout, suitable_layers(target.model)
    if layout.is_compiled:
        # Units for half precision are faster than loops.
        is_slower = target.dtype.itemsize < 4 and has_blocks(target.dtype)
        rows = [n for n in ROWS if n <= MOST_DOT_ROWS and not is_slower]
        return LinearLayouts(layout, layers, {size_of(layer): rows for layer in layers})
    num_weights = sum(layer.weight.numel() for layer in layers)
    if num_weights < FEWEST_WEIGHTS:
        return LinearLayouts(layout, [], {})
    itemsize = target.dtype.itemsize if has_blocks(target.dtype) else 4
    if num_weights * itemsize > MEMORY_SHARE * _free_memory():
        return LinearLayouts(layout, [], {})
    name, key = f"{layout.name}-layers", machine_key(target)
    try:
        found = {
            (int(outputs), int(inputs)): frozenset(map(int, rows))
            for outputs, inputs, rows in read_measured(name, key)
        }
    except (TypeError, ValueError):  # none there, or not one of ours
        found = measure(layout, layers)
        write_measured(name, key, [[*size, sorted(rows)] for size, rows in found.items()])
    return LinearLayouts(layout, layers, found)


@torch.inference_mode()
def measure(layout: Layout, layers: Sequence[nn.Linear]) -> dict[Size, frozenset[int]]:
    """Time copies of layers of every size, in about two seconds for a model of a billion weights.

    Returns:
        For which of `ROWS` and `PROMPT_ROWS` copies are worthwhile, by size.
    """
    is_small = sum(layer.weight.numel() for layer in layers) < SMALL
    by_size: dict[Size, list[nn.Linear]] = {}
    for layer in layers:
        by_size.setdefault(size_of(layer), []).append(layer)
    found = {}
    for size, alike in by_size.items():
        weight = alike[0].weight
        count = max(1, TIMED_BYTES // (weight.numel() * weight.element_size()))
        found[size] = _worthwhile_rows(layout, alike[:count], is_small)
    return found


def _worthwhile_rows(
    layout: Layout, layers: Sequence[nn.Linear], is_for_all: bool
) -> frozenset[int]:
    """Return for which numbers of rows layers of one size are faster with copies: for all drafts or for
    none, if that can be, or for each by itself.
    """
    stock, weight = [layer.forward for layer in layers], layers[0].weight
    is_decided = decides_near_ties(weight.dtype)
    numbers = ROWS if is_decided else (*ROWS, PROMPT_ROWS)
    inputs = {n: torch.randn(1, n, weight.shape[1]).to(weight.dtype) for n in numbers}
    try:
        copied = [layout.copied(layer) for layer in layers]
        ratios = {n: _time_ratio(copied, stock, rows) for n, rows in inputs.items()}
        may_use_one = is_decided or all(
            torch.equal(ours(inputs[1]), theirs(inputs[1]))
            for ours, theirs in zip(copied, stock, strict=True)
        )
    except (RuntimeError, AttributeError):
        return frozenset()  # this build of torch has no such kernel
    fast = {n for n, ratio in ratios.items() if ratio < 1 - WORTHWHILE}
    if not may_use_one:
        fast -= {1}
    elif is_for_all:
        is_faster = statistics.geometric_mean(ratios[n] for n in USUAL_ROWS) < 1 - WORTHWHILE
        fast = fast.union(ROWS) if is_faster else fast.difference(ROWS)
    return frozenset(fast)


def _time_ratio(some: Sequence[Forward], others: Sequence[Forward], rows: torch.Tensor) -> float:
    """Return the time that some layers take for the same rows as a share of what others take."""
    times: tuple[list[float], list[float]] = ([], [])
    # Many rows are computed for longer than weights are read.
    count = max(1, len(some) * PACKED_ROWS // max(PACKED_ROWS, rows.shape[1]))
    for _ in range(NUM_TIMES):
        for layers, found in zip((some, others), times, strict=True):
            begun = time.perf_counter()
            for layer in layers[:count]:
                layer(rows)
            found.append(time.perf_counter() - begun)
        if sum(times[1]) > ENOUGH_SECONDS:
            break
    return statistics.median(times[0]) / statistics.median(times[1])


def _free_memory() -> int:
    """Return the bytes of free memory; 0 if the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
