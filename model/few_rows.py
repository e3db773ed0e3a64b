"""The kernels for passes over a few rows on a CPU, `few_rows.cpp`, built where they first run.

torch's own matrix product is made for many rows. Over the handful of a draft it reads weights at a
fraction of what memory gives. The kernel reads each once, and in float32 and half precision
sums in float32. So does one for attention (`few_queries.h`): torch's takes 1.3 to 7 times as long. Another
finds the largest logits of a row in one look at it.

The files are built by the system's C++ compiler, in about 20 seconds, once for each version of torch, and kept
where torch keeps its extensions (`TORCH_EXTENSIONS_DIR`).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("few_rows.cpp")
HEADERS = (SOURCE.with_name("few_rows.h"), SOURCE.with_name("few_queries.h"))
# What torch's vector classes are, by what the processor has.
INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c"),
}
# Units for bfloat16, which some processors with AVX-512 have.
BFLOAT16_UNITS = "-mavx512bf16"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BUILD_SECONDS = 300


class KernelError(Exception):
    """The kernel cannot be had here; the message says why in one line."""


@cache
def few_rows_kernel() -> str | None:
    """Load the kernels as `torch.ops.token_recycling`'s `few_rows`, `attend` and `largest`, built if
    need be.

    Returns:
        A name of this build; None where it cannot be had, which standard error says once.
    """
    try:
        library = _library()
        if not library.exists():
            _build(library)
        torch.ops.load_library(str(library))
    except (KernelError, ImportError, OSError) as error:
        print(
            f"passes over a few rows use torch's own kernels, which are slower: {error}",
            file=sys.stderr,
        )
        return None

    torch.library.register_fake("token_recycling::few_rows", _outputs)
    torch.library.register_fake("token_recycling::attend", _attended)
    torch.library.register_fake("token_recycling::largest", _largest)
    return library.stem


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_available() -> bool:
    """Whether the kernels can be had here; the first to ask loads them. A compiler takes it for a fact."""
    return few_rows_kernel() is not None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attend by the kernel for a few queries, where it is available.

    Args:
        query: [1, H, n, D].
        key: [1, K, T, D], for H / K heads of queries each.
        value: [1, K, T, E].
        mask: [1, 1, n, T], boolean (what is seen) or additive; None: all is seen.
        scale: of the scores.

    Returns:
        Attended values [1, n, H, E].

    Raises:
        RuntimeError: if shapes or dtypes do not fit.
    """
    attended: torch.Tensor = torch.ops.token_recycling.attend.default(
        query, key, value, mask, scale
    )
    return attended


def _outputs(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return outputs of the right shape and dtype, for a compiler."""
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return attended values of the right shape and dtype, for a compiler."""
    _, num_heads, num_queries, _ = query.shape
    return query.new_empty((1, num_queries, num_heads, value.shape[-1]))


def _largest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and columns of the right shape and dtype, for a compiler."""
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _instructions() -> tuple[str, ...]:
    """Return the compiler's options for what this processor has.

    Raises:
        KernelError: if the kernels are not for it.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or capability not in INSTRUCTIONS:
        raise KernelError(
            f"processor: got {capability} on {sys.platform}; allowed: {', '.join(INSTRUCTIONS)} on linux"
        )
    instructions = INSTRUCTIONS[capability]
    if capability == "AVX512" and torch.cpu._is_avx512_bf16_supported():
        instructions += (BFLOAT16_UNITS,)
    return (*instructions, f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}")


def _library() -> Path:
    """Return where the kernel is kept for this processor, source and torch.

    Raises:
        KernelError: if it is not for this processor.
        ImportError: if torch's tools for extensions lack what they need.
    """
    # It imports setuptools, which takes a third of a second, and is not everywhere.
    from torch.utils import cpp_extension

    content = b"".join(file.read_bytes() for file in (SOURCE, *HEADERS))
    content += f"{torch.__version__} {_instructions()}".encode()
    name = f"few-rows-{hashlib.sha256(content).hexdigest()[:12]}.so"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root) / "token-recycling" / name


def _build(library: Path) -> None:
    """Build the kernel.

    Raises:
        KernelError: if there is no compiler, or it fails.
        OSError: if the folder cannot be written.
    """
    from torch.utils import cpp_extension

    library.parent.mkdir(parents=True, exist_ok=True)
    temporary = library.with_suffix(f".{os.getpid()}.tmp")
    command = (
        cpp_extension.get_cxx_compiler(),
        *("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi"),
        *_instructions(),
        *(f"-isystem{folder}" for folder in cpp_extension.include_paths()),
        *(str(SOURCE), "-o", str(temporary)),
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        *("-lc10", "-ltorch_cpu"),
    )
    print("building the kernel for passes over a few rows (once, about 20 s)", file=sys.stderr)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            raise KernelError(f"{command[0]} failed: {lines[0] if lines else done.returncode}")
        # Others may build at the same time, and use what they find.
        os.replace(temporary, library)
    except FileNotFoundError as error:
        raise KernelError(
            f"no C++ compiler: got {command[0]}; install g++, or name one as CXX"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise KernelError(f"{command[0]} took more than {BUILD_SECONDS} s") from error
    finally:
        temporary.unlink(missing_ok=True)
