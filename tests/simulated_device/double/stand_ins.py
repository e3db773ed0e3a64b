"""Stand-ins for `torch.cuda` while GPUs are simulated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .graph import SimulatedCapture, SimulatedGraph
from .operations import ONE_KERNEL
from .tensor import active_device, set_data

# Of the card whose figures are shown; nothing depends on them but names and printed shares.
PROPERTIES = SimpleNamespace(
    name="simulated", major=8, minor=0, total_memory=80 << 30, multi_processor_count=108
)


@contextmanager
def stand_ins(device: Any) -> Iterator[None]:
    """Within the block `torch.cuda` tells of simulated devices."""
    with ExitStack() as block:
        block.enter_context(mock.patch.multiple(torch.cuda, **_of_cuda(device)))
        block.enter_context(mock.patch.object(torch, "Generator", SimulatedGenerator))
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

        def has_kernel_here(name: str, key: str) -> bool:
            is_simulated = key == "CUDA" and name.partition("::")[2] in ONE_KERNEL
            return is_simulated or bool(has_kernel(name, key))

        patch = mock.patch.object(torch._C, has_kernel.__name__, has_kernel_here)
        block.enter_context(patch)
        clear = mock.patch.object(
            torch._C, "_cuda_clearCublasWorkspaces", device.clear_workspaces, create=True
        )
        block.enter_context(clear)
        # torch.tensor makes numbers on the CPU and copies them by an operation that modes see.
        block.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        # Beside `.data = x` this is what moves modules.
        data = property(torch._C.TensorBase.data.__get__, set_data)  # type: ignore[attr-defined]
        block.enter_context(mock.patch.object(torch.Tensor, "data", data, create=True))
        yield


MEMORY_FIGURES = (
    *("memory_allocated", "max_memory_allocated"),
    *("memory_reserved", "max_memory_reserved"),
)
STREAMS = ("current_stream", "default_stream")
# What is asked about a card and its memory.
OF_CARD: dict[str, Any] = {
    "get_device_name": lambda which=None: PROPERTIES.name,
    "get_device_capability": lambda which=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_properties": lambda which=None: PROPERTIES,
    "mem_get_info": lambda which=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
    **dict.fromkeys(MEMORY_FIGURES, lambda which=None: 0),
    "empty_cache": lambda: None,
    "reset_peak_memory_stats": lambda which=None: None,
}


def _of_cuda(device: Any) -> dict[str, Any]:
    """Return the replacements of members of `torch.cuda`, by name."""

    def synchronize(which: Any = None) -> None:
        device.wait("synchronize")

    def exchange(which: int) -> int:
        before, device.index = device.index, which if which >= 0 else device.index
        return before

    def set_device(which: Any) -> None:
        exchange(which if isinstance(which, int) else torch.device(which).index or 0)

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: device.num_devices,
        "current_device": lambda: device.index,
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: device.recording is not None,
        **OF_CARD,
        **dict.fromkeys(STREAMS, lambda which=None: SimulatedStream()),
        "Stream": SimulatedStream,
        "Event": SimulatedEvent,
        "stream": lambda stream: stream,
        "CUDAGraph": SimulatedGraph,
        "graph": SimulatedCapture,
        "graph_pool_handle": device.new_pool,
    }


class SimulatedStream:
    """Stands in for `torch.cuda.Stream`: all work is in one order anyway."""

    def __init__(self, *_: object, **__: object) -> None:
        self._device = active_device()

    def __enter__(self) -> SimulatedStream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def synchronize(self) -> None:
        """Wait for all work."""
        self._device.wait("synchronize")

    def wait_stream(self, other: SimulatedStream) -> None:
        """Let the device wait, not the host."""

    def wait_event(self, event: SimulatedEvent) -> None:
        """Let the device wait, not the host."""

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """Return an event at this point of the work."""
        event = event or SimulatedEvent()
        event.record()
        return event

    def query(self) -> bool:
        """Say that the work is done."""
        return True


class SimulatedEvent:
    """Stands in for `torch.cuda.Event`; its times are those of the host."""

    def __init__(self, *_: object, **__: object) -> None:
        self._device, self._seconds = active_device(), 0.0

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for all work."""
        self._device.wait("synchronize")

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Let the device wait, not the host."""

    def query(self) -> bool:
        """Say that the work is done."""
        return True

    def elapsed_time(self, later: SimulatedEvent) -> float:
        """Return the milliseconds until another event."""
        return 1e3 * (later._seconds - self._seconds)


class SimulatedGenerator(torch.Generator):
    """A generator of a simulated device: the CPU's numbers."""

    _simulated: torch.device

    def __new__(cls, device: Any = "cpu") -> SimulatedGenerator:
        """Return a generator of the CPU that says it is on the device."""
        generator: SimulatedGenerator = super().__new__(cls)
        generator._simulated = torch.device(device)
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that was asked for."""
        return self._simulated
