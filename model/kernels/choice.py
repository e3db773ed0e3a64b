"""Choose the fastest kernel for each linear layer and number of rows: measured once, kept on disk.

Shapes: n rows, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from ..machine.measurements import read_measured, write_measured
from ..machine.memory import free_memory
from ..machine.timing import interleaved_medians
from .linear import (
    FEW_ROWS,
    KERNELS,
    PACKED,
    PACKED_ROWS,
    ROWS,
    Forward,
    Kernel,
    LinearKernels,
    Size,
    has_blocks,
    size_of,
)
from .short_pass import DTYPES, short_pass_kernel

USUAL_ROWS = (1, 4, 8, 16)
# Smaller models spend their time elsewhere.
FEWEST_WEIGHTS = 2**20
# Share of a layer's time that a kernel must save.
WORTHWHILE = 0.05
NUM_TIMES = 25
ENOUGH_SECONDS = 0.05  # of timing one kernel; then it is not repeated
# Below this many weights, originals or copies may fit the processor's cache, but hardly both.
SMALL = 2**24
# Timing reads this many weights in turn, since in a pass each layer's come from memory.
TIMED_BYTES = 2**25
# Above this many multiplications, only some of a layer's outputs are timed.
MOST_PRODUCTS = 2**31
# Share of the free memory that copies may take.
MEMORY_SHARE = 0.5


def suitable_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers that may use other kernels: `nn.Linear` with ordinary weights on the CPU, uncompiled."""
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


def linear_kernels(
    model: nn.Module, dtype: torch.dtype, machine: str, is_compiled: bool
) -> LinearKernels:
    """Return the fastest linear kernels for a model on this machine: measured once, then read from disk.

    Weights are copied only if the copies fit into memory.

    Args:
        model: the model.
        dtype: dtype of its weights.
        machine: key of model and machine (`machine_key`).
        is_compiled: whether passes are compiled.
    """
    layers = suitable_layers(model)
    num_weights = sum(layer.weight.numel() for layer in layers)
    if num_weights < FEWEST_WEIGHTS:
        return LinearKernels([], {}, is_compiled)
    build = short_pass_kernel() if dtype in DTYPES else None
    kernels = [FEW_ROWS] if build else []
    itemsize = dtype.itemsize if has_blocks(dtype) else 4
    # The compiler does not support oneDNN's layout, and float64 would be rounded.
    is_allowed = not is_compiled and dtype in DTYPES
    if is_allowed and num_weights * itemsize <= MEMORY_SHARE * free_memory():
        kernels.append(PACKED)
    name = "linear-kernels"
    key = "-".join((machine, *(kernel.name for kernel in kernels if kernel.is_copy)))
    key += f"-{build}" if build else ""
    try:
        content = read_measured(name, key)
        if tuple(content["rows"]) != ROWS:
            raise ValueError("measured for other numbers of rows")
        chosen = {
            (int(outputs), int(inputs)): {int(n): KERNELS[kernel] for n, kernel in by_rows}
            for outputs, inputs, by_rows in content["sizes"]
        }
    except (TypeError, ValueError, KeyError):  # no file, or not a valid one
        chosen = measure(kernels, layers)
        sizes = [
            [*size, [(n, kernel.name) for n, kernel in sorted(by_rows.items())]]
            for size, by_rows in chosen.items()
        ]
        write_measured(name, key, {"rows": ROWS, "sizes": sizes})
    return LinearKernels(layers, chosen, is_compiled)


@torch.inference_mode()
def measure(
    kernels: Sequence[Kernel], layers: Sequence[nn.Linear]
) -> dict[Size, dict[int, Kernel]]:
    """Time layers of every size: takes seven seconds for two kernels, 150M weights, two cores with AVX2.

    Args:
        kernels: in the order of preference.
        layers: layers of one dtype.

    Returns:
        By layer size: the kernel for each number in `ROWS` where one is worth using.
    """
    is_small = sum(layer.weight.numel() for layer in layers) < SMALL
    by_size: dict[Size, list[nn.Linear]] = {}
    for layer in layers:
        by_size.setdefault(size_of(layer), []).append(layer)
    chosen = {}
    for size, alike in by_size.items():
        weight = alike[0].weight
        count = max(1, TIMED_BYTES // (weight.numel() * weight.element_size()))
        ratios = {kernel: _ratios(kernel, alike[:count]) for kernel in kernels}
        chosen[size] = _fastest(ratios, is_small)
    return chosen


def _ratios(kernel: Kernel, layers: Sequence[nn.Linear]) -> dict[int, float]:
    """Return the kernel's time as a share of the original layers' time, by rows; layers are of one size."""
    weight, ratios = layers[0].weight, {}
    try:
        made = [kernel.made(layer) for layer in layers]
        for n in ROWS:
            some, others = made, [layer.forward for layer in layers]
            if n * weight.numel() > MOST_PRODUCTS:
                part = _part_of(layers[0], MOST_PRODUCTS // n)
                some, others = [kernel.made(part)], [part.forward]
            generator = torch.Generator().manual_seed(0)  # not the user's
            rows = random_numbers((1, n, weight.shape[1]), generator, weight.dtype)
            ratios[n] = _time_ratio(some, others, rows)
    except (RuntimeError, AttributeError):
        return {}  # this build of torch has no such kernel
    return ratios


def random_numbers(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    """Return normal random numbers on the generator's device, whatever torch's default device is."""
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def _part_of(layer: nn.Linear, num_weights: int) -> nn.Linear:
    """Return a layer with only the first outputs, about this many weights, and no bias."""
    num_outputs = max(1, num_weights // layer.in_features)
    part = nn.Linear(layer.in_features, num_outputs, bias=False, device="meta")
    part.weight = nn.Parameter(layer.weight[:num_outputs], requires_grad=False)
    return part


def _fastest(ratios: Mapping[Kernel, Mapping[int, float]], is_small: bool) -> dict[int, Kernel]:
    """Return the fastest kernel for each number of rows where one is worth using.

    A small model uses copies for all drafts of usual sizes or for none. Larger drafts are limited
    by computing, not by reading weights.
    """
    chosen: dict[int, Kernel] = {}
    best: dict[int, float] = {}
    for kernel, by_rows in ratios.items():
        bounds = {n: (1 - WORTHWHILE) * best.get(n, 1.0) for n in by_rows}
        faster = {n for n, ratio in by_rows.items() if ratio < bounds[n]}
        if is_small and kernel.is_copy and by_rows:
            gain = statistics.geometric_mean(by_rows[n] / best.get(n, 1.0) for n in USUAL_ROWS)
            usual = {n for n in ROWS if n <= USUAL_ROWS[-1]}
            faster -= usual
            if gain < 1 - WORTHWHILE:
                faster |= usual
        chosen |= {n: kernel for n in faster}
        best |= {n: by_rows[n] for n in faster}
    return chosen


def _time_ratio(some: Sequence[Forward], others: Sequence[Forward], rows: torch.Tensor) -> float:
    """Return the time of `some` layers as a share of the time of `others`, for the same rows."""
    # With many rows computing takes longer than reading weights.
    count = max(1, len(some) * PACKED_ROWS // max(PACKED_ROWS, rows.shape[1]))

    def run(layers: Sequence[Forward]) -> None:
        for layer in layers[:count]:
            layer(rows)

    calls = (partial(run, some), partial(run, others))
    seconds, other_seconds = interleaved_medians(calls, NUM_TIMES, ENOUGH_SECONDS)
    return seconds / other_seconds
