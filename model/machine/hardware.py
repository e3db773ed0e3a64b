"""The hardware under torch: memory of weights, copies to a GPU and back, CUDA graphs, OpenMP's threads, names.

**Lines.** A vector of 64 bytes that begins anywhere but at a cache line lies in two lines. Weights that are mapped
from a file, or come from numpy, begin anywhere. A pass of one row over a Qwen3 of 0.2B parameters in float32 takes
57 ms if they are mapped, and 39 ms if they begin at lines (AMD EPYC with AVX-512, one thread).

**Huge pages.** A pass reads every weight once, so the processor looks up a page for every 4 KiB of them. On a
virtual machine that costs up to two fifths of a memory's speed: one thread of an AMD EPYC (Firecracker, Linux 6.18)
reads 16 GB/s from small pages and 26 GB/s from huge ones. The tensors stay where they are, and so do all numbers.

**Copies.** A copy to a GPU from ordinary memory makes the host wait for everything that the GPU has been given so
far. From page-locked (pinned) memory it is one more entry in the GPU's queue.

**OpenMP.** Each thread that computes in parallel gets a pool of further threads, for as long as it lives. GCC's
runtime, which torch brings on Linux, counts the threads of all pools: if they are more than the processors, they
sleep between parallel regions instead of waiting actively. A pass has over a hundred regions. So a program that
loads a model in one thread and decodes in another was slower with two threads than with one (SmolLM2-135M Q4_1,
two cores: 16 to 20 ms a pass; 8 to 10 ms in the thread that loaded it).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

Value = TypeVar("Value")
LINE = 64  # bytes, as torch's own memory is aligned
PAGE = 2**21
# Of <linux/mman.h>, since Linux 6.1: make huge pages of what lies there, now.
COLLAPSE = 25
# `omp_pause_soft` (OpenMP 5.0, section 3.2.44): what the runtime holds may be freed, and settings stay.
SOFT = 1
# As Linux names them, of x86 and of Arm, from old to new.
INSTRUCTION_SETS = (
    *(
        "avx",
        "avx2",
        "fma",
        "avx512f",
        "avx512_vnni",
        "avx512_bf16",
        "avx_vnni",
        "amx_int8",
        "amx_bf16",
    ),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)
# By what torch calls its choice of kernels.
UNUSED_BY = {"AVX2": ("avx512", "amx"), "DEFAULT": ("avx", "fma", "amx")}
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


@torch.no_grad()
def begin_at_lines(model: nn.Module) -> None:
    """Copy the parameters on a CPU that begin within a line into torch's own memory; all numbers stay the same.

    A weight that is mapped from a file is in this process's memory from then on.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % LINE:
            parameter.data = parameter.data.clone()


class HugePages:
    """Puts the memory of tensors into huge pages: in a thread, or at once.

    Nothing is copied into other tensors: texts may be decoded meanwhile, but slower. What cannot be a huge page
    stays as it is.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages = [one.untyped_storage() for one in tensors if one.device.type == "cpu"]
        self._collapsing = Lock()

    def start(self, lock: AbstractContextManager[Any]) -> None:
        """Begin in a thread, which ends by itself, once nobody holds a lock."""

        def run() -> None:
            with lock:
                pass
            self.finish()

        if sys.platform == "linux" and self._storages:
            Thread(target=run, daemon=True, name="huge-pages").start()

    def finish(self) -> None:
        """Return when all is done."""
        with self._collapsing:
            if sys.platform == "linux":
                _collapse(self._storages)
            self._storages = []  # whose memory may be freed now


def huge_pages_are_possible() -> bool:
    """Whether this system makes huge pages of memory that is in use; tried on one."""
    tried = torch.ones(3 * PAGE, dtype=torch.uint8)
    return sys.platform == "linux" and _collapse([tried.untyped_storage()]) > 0


def _collapse(storages: Iterable[torch.UntypedStorage]) -> int:
    """Make huge pages of the storages' memory; return how many there are."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    places = {(storage.data_ptr(), storage.nbytes()) for storage in storages}
    pages = {
        page for begin, size in places for page in range(begin // PAGE * PAGE, begin + size, PAGE)
    }
    return sum(madvise(page, PAGE, COLLAPSE) == 0 for page in sorted(pages))


def uploaded(values: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    """Return a tensor or a list of the host on a device, without waiting for a GPU; a tensor that is there
    already is returned as it is.
    """
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(values, dtype=torch.long, device="cpu")
    if values.device == device or device.type != "cuda":
        return values.to(device)
    # Torch reuses the pinned memory only after the copy.
    return values.pin_memory().to(device, non_blocking=True)


def write(place: torch.Tensor, values: np.ndarray) -> None:
    """Copy numbers of the host to a tensor on a device; the host does not wait for a GPU."""
    host = torch.from_numpy(values)
    if place.device.type == "cuda":
        host = host.pin_memory()  # torch reuses it only after the copy
    place.copy_(host, non_blocking=True)


def downloaded(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host, after one wait if it is on a GPU."""
    if values.device.type != "cuda":
        return values.cpu()
    pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return pinned


class CapturedGraph(NamedTuple):
    """A captured call and its output, whose tensors every replay overwrites."""

    graph: torch.cuda.CUDAGraph
    output: Any


def captured_graph(
    call: Callable[[], Any], device: torch.device, pool: Any = None
) -> CapturedGraph:
    """Capture a call, which only launches kernels on a GPU, without executing it; it must have run once before.

    A graph's products work in memory that cuBLAS keeps for a stream. Torch frees it for all streams where other
    code of the process captures, such as `generate` with a static cache. So each capture takes its own, in the
    graph's memory, and leaves none to others.

    `pool` is memory that is shared with other graphs, from `torch.cuda.graph_pool_handle`; None: its own.

    Raises:
        RuntimeError: if it does what a graph cannot hold, such as waiting for the device.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device meanwhile.
    recording = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.device(device), recording:
        output = call()
    torch._C._cuda_clearCublasWorkspaces()
    return CapturedGraph(graph, output)


def give_back_threads() -> None:
    """End the pool of this thread, if it has one; the next parallel region makes another.

    Both together take some 50 us for each of its threads.
    """
    if pause := _pause():
        pause(SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """Return the runtime's function; None where torch has another runtime, or an old one."""
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        return None
    try:
        # Of torch's own runtime: other packages bring others.
        pause: Callable[[int], int] = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    return pause


def machine_key(facts: Sequence[str], device: torch.device, dtype: torch.dtype) -> str:
    """Return a hash of everything that the time of a model's pass depends on: machine and model facts."""
    parts = (
        *facts,
        f"{device} {device_name(device)} {torch.backends.cpu.get_cpu_capability()}",
        f"{platform.machine()} {machine_name()} {torch.get_num_threads()}",
        f"{dtype} {torch.__version__}",
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """Return the name of the hardware behind a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    name = _processor().get("model name") or platform.processor() or platform.machine()
    return f"cpu ({name})"


def machine_name() -> str:
    """Return what tells this machine from others whose processors have the same name.

    Its cores, the processor's family and model, those of its instruction sets that decide a pass's speed, and the
    frequency governor where it can be read: "2 cores, family 25 model 1, avx2 fma".
    """
    processor = _processor()
    parts = [f"{os.cpu_count()} cores"]
    if "cpu family" in processor:
        parts.append(f"family {processor['cpu family']} model {processor.get('model')}")
    parts.append(" ".join(instruction_sets()) or platform.machine())
    with suppress(OSError):
        parts.append(f"governor {GOVERNOR.read_text(encoding='utf-8').strip()}")
    return ", ".join(parts)


def instruction_sets() -> list[str]:
    """Return those of `INSTRUCTION_SETS` that the processor has and torch may use, from old to new.

    `ATEN_CPU_CAPABILITY` limits torch, and our kernels with it. None where Linux does not say.
    """
    processor = _processor()
    found = set((processor.get("flags") or processor.get("Features") or "").split())
    unused = UNUSED_BY.get(torch.backends.cpu.get_cpu_capability(), ())
    return [name for name in INSTRUCTION_SETS if name in found and not name.startswith(unused)]


@cache
def _processor() -> dict[str, str]:
    """Return what Linux says of the first processor; empty elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


class Kept(Generic[Value]):
    """The value that was made last; weights of a model, say, of which two do not fit into memory."""

    def __init__(self) -> None:
        self._kept: tuple[object, Value] | None = None

    def get(self, key: object, make: Callable[[], Value]) -> Value:
        """Return the value of a key, such as a dtype: the kept one, or a new one in its place."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # freed before the next one is made, where nobody else holds it
            self._kept = key, make()
        return self._kept[1]
