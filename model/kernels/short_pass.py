"""The CPU kernels for passes over a few rows, `short_pass.cpp`, built at the first use.

Torch's matrix product is made for many rows; for the few rows of a draft it reads weights at a
fraction of the memory's speed. Our kernel reads each weight once and sums in float32, in half
precision too. So does the one for attention (`short_attention.h`): torch's takes 1.3 to 7 times as
long. A third finds the largest logits of a row in one pass over it.

The files are built once for each version of torch and kind of processor (`model.machine.files`).

Shapes: n queries in each of H heads, T keys and values in each of K heads; D and E numbers in a key and a value.
"""

from __future__ import annotations

import logging
import platform
import sys
from functools import cache
from pathlib import Path

import torch

from ..machine.files import BuildError, built

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "cpp" / "short_pass.cpp"
HEADERS = sorted(SOURCE.parent.glob("*.h"))
# torch's vector classes by the processor's instruction set.
INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c"),
}
# On ARM the instructions of AVX2 are those of SIMDe's headers (`portable.h`); correct under emulation, never timed.
ARM = "aarch64"
# Processors with units for bfloat16 have those for whole numbers of eight bits.
BFLOAT16_UNITS, INT8_UNITS = "-mavx512bf16", "-mavx512vnni"
# Of processors: torch's instruction set, and whether there are units for bfloat16.
KINDS = (("AVX2", False), ("AVX512", False), ("AVX512", True))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class UnsupportedProcessorError(BuildError):
    """The kernels are not made for this processor."""


@cache
def short_pass_kernel() -> str | None:
    """Load the kernels `few_rows`, `attend` and `largest` of `torch.ops.token_recycling`; build them if needed.

    Returns:
        A name of this build; None if it cannot be built or loaded, with a warning that says why.
    """
    try:
        library = kernel_library()
        # The package under its other name (`model` or `token_recycling`) may have loaded its build
        # already, and torch aborts if two builds register the same operators.
        is_loaded = hasattr(torch.ops.token_recycling, "few_rows")
        if not is_loaded:
            torch.ops.load_library(str(library))
    except (BuildError, ImportError, OSError) as error:
        logger.warning(
            "passes over a few rows use torch's own kernels, which are slower: %s", error
        )
        return None

    if not is_loaded:
        torch.library.register_fake("token_recycling::few_rows", _outputs)
        torch.library.register_fake("token_recycling::attend", _attended)
        torch.library.register_fake("token_recycling::largest", _largest)
    return library.stem


def _outputs(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool = False,
) -> torch.Tensor:
    _, num_heads, num_queries, _ = query.shape
    return query.new_empty((1, num_queries, num_heads, value.shape[-1]))


def _largest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def kernel_library(kind: tuple[str, bool] | None = None) -> Path:
    """Return the library for this torch and a kind of processor, built if needed; None: for this processor.

    Raises:
        UnsupportedProcessorError: if the kernels are not made for it.
        BuildError, ImportError, OSError: as `built`.
    """
    what = "the kernels for passes over a few rows (once, about 20 s)"
    options = ("-fopenmp", "-Wno-psabi", *_instructions(*(kind or this_kind())))
    version = torch.__version__.partition("+")[0]  # a build for a GPU has the same interface
    return built((SOURCE, *HEADERS), what, options, _libraries, version)


def _libraries() -> tuple[str, ...]:
    from torch.utils import cpp_extension

    return (
        *(f"-isystem{folder}" for folder in cpp_extension.include_paths()),
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        *("-lc10", "-ltorch_cpu"),
    )


def kinds() -> tuple[tuple[str, bool], ...]:
    """Return the kinds of processors of this platform, which a wheel for it has libraries for."""
    return ((ARM, False),) if platform.machine() == ARM else KINDS


def this_kind() -> tuple[str, bool]:
    if platform.machine() == ARM:
        return ARM, False
    return torch.backends.cpu.get_cpu_capability(), has_bfloat16_units()


def _instructions(capability: str, has_units: bool) -> tuple[str, ...]:
    """Return the compiler options for a kind of processor; raise UnsupportedProcessorError for others."""
    if sys.platform == "linux" and capability == ARM:
        return "-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"
    if sys.platform != "linux" or capability not in INSTRUCTIONS:
        raise UnsupportedProcessorError(
            f"processor: got {capability} on {sys.platform}; allowed: {', '.join(INSTRUCTIONS)} or {ARM} on linux"
        )
    units = (BFLOAT16_UNITS, INT8_UNITS) if has_units else ()
    of_torch = (f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}")
    return (*INSTRUCTIONS[capability], *units, *of_torch)


def has_bfloat16_units() -> bool:
    """Whether torch may use this processor's units for bfloat16, which some with AVX-512 have."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability == "AVX512" and torch.cpu._is_avx512_bf16_supported()
