"""CUDA graphs, simulated: kernels recorded once at fixed addresses, and replayed without Python.

A capture runs nothing: whatever is written to memory from before it is written back at its end. What the host
knew, numbers and branches, is in the recording for good.

A graph's products work in memory of cuBLAS's, which the first capture takes and later ones use too, until torch is
told to clear it. That frees it for the graphs that did not take it: their replays end as on a GPU.

Graphs of one pool share memory: what is free in one is used by graphs captured later. So a replay makes the
results of later graphs of its pool garbage, as it may on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from .accounts import REPLAY
from .errors import CaptureError
from .tensor import SimulatedTensor, active_device, leaves

# Bytes of memory that another graph has used: NaN as floating-point numbers.
GARBAGE = 0xFF
Pool = tuple[int, int]


@dataclass(slots=True)
class _Kernel:
    """A recorded call on tensors of the CPU, and its result, whose addresses later kernels read."""

    call: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any

    def replay(self) -> None:
        """Run again; write the result to where it was."""
        fresh = leaves(self.call(*self.args, **self.kwargs))
        for old, new in zip(leaves(self.result), fresh, strict=True):
            if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                old.copy_(new)


@dataclass(eq=False)
class Workspace:
    """The memory in which products of captured calls work; whose capture took it."""

    taken_by: Recording
    is_freed: bool = False


@dataclass(eq=False)
class Recording:
    """The record of one capture.

    Attributes:
        num_kernels: launches on a GPU.
        workspace: that of its products.
    """

    num_kernels: int = 0
    workspace: Workspace | None = None
    _kernels: list[_Kernel] = field(default_factory=list)
    _before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(
        default_factory=dict
    )
    # Everything made within, by address: kept, so that no address comes twice.
    _made: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _results: list[weakref.ref[SimulatedTensor]] = field(default_factory=list)
    _is_spoiled: bool = False

    def run(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        written: Sequence[torch.Tensor],
        is_kernel: bool,
    ) -> Any:
        """Run a call for its shapes; note what it writes, to undo that.

        Args:
            call: takes and returns tensors of the CPU.
            args: its arguments.
            kwargs: its named arguments.
            written: those that it writes.
            is_kernel: whether it is part of a replay; views and allocations are not.
        """
        for tensor in written:
            self._save(tensor.untyped_storage())
        result = call(*args, **kwargs)
        known = {_address(value) for value in leaves((args, kwargs))}
        for value in leaves(result):
            if isinstance(value, torch.Tensor) and _address(value) not in known:
                self._made[_address(value)] = value.untyped_storage()
        if is_kernel:
            self._kernels.append(_Kernel(call, args, kwargs, result))
        return result

    def run_later(self, call: Callable[..., Any], args: Sequence[Any]) -> None:
        """Record a call without a result, not to be run before a replay."""
        self._kernels.append(_Kernel(call, args, {}, None))

    def made(self, tensor: SimulatedTensor) -> None:
        """Note a tensor that the captured code got."""
        self._results.append(weakref.ref(tensor))

    def end(self) -> None:
        """Undo what was written to memory from before; results have no numbers until a replay."""
        for storage, numbers in self._before.values():
            storage.copy_(numbers)
        self._before.clear()
        self._results = [result for result in self._results if result() is not None]
        self.spoil()

    def replay(self) -> None:
        """Run all kernels.

        Raises:
            RuntimeError: if the memory of its products is no longer there.
        """
        if self.workspace and self.workspace.is_freed and self.workspace.taken_by is not self:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._is_spoiled = False
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            for kernel in self._kernels:
                kernel.replay()

    def spoil(self) -> None:
        """Make results that are still held garbage."""
        if self._is_spoiled:
            return
        self._is_spoiled = True
        for result in self._results:
            tensor = result()
            storage = self._made.get(_address(tensor.held)) if tensor is not None else None
            if storage is not None:
                storage.fill_(GARBAGE)  # type: ignore[attr-defined]

    def _save(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address not in self._made and address not in self._before:
            self._before[address] = (storage, storage.clone())


def _address(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


class SimulatedGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._device = active_device()
        self._recording: Recording | None = None
        self._pool: Pool | None = None

    @property
    def num_kernels(self) -> int:
        """Kernels that a replay runs."""
        return self._recorded().num_kernels

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        """Begin to record.

        Raises:
            CaptureError: if a capture is under way, or this graph has one.
        """
        if self._recording is not None or self._device.recording is not None:
            raise CaptureError("capture: begun within another, or for a graph that has one")
        self._pool = pool or self._device.new_pool()
        self._device.recording = self._recording = recording = Recording()
        self._device.workspace = self._device.workspace or Workspace(recording)
        recording.workspace = self._device.workspace

    def capture_end(self) -> None:
        """End the recording."""
        self._device.recording = None
        recording = self._recorded()
        recording.end()
        self._device.pools.setdefault(self._pool, []).append(weakref.ref(recording))

    def replay(self) -> None:
        """Run the recorded kernels: one launch.

        Raises:
            RuntimeError: if nothing was captured.
            CaptureError: if a capture is under way.
        """
        recording = self._recorded()
        if self._device.recording is not None:
            raise CaptureError("replay: called while a graph is captured")
        accounts = self._device.accounts
        accounts.launches[REPLAY] += 1
        accounts.replayed_kernels += recording.num_kernels
        of_pool = [found for ref in self._device.pools[self._pool] if (found := ref())]
        recording.replay()
        for later in of_pool[of_pool.index(recording) + 1 :]:
            later.spoil()

    def reset(self) -> None:
        """Forget the recording."""
        self._recording = None

    def pool(self) -> Pool | None:
        """Return the pool of the graph's memory."""
        return self._pool

    def _recorded(self) -> Recording:
        if self._recording is None:
            raise RuntimeError("graph: nothing was captured; capture before replay")
        return self._recording


class SimulatedCapture:
    """Stands in for `torch.cuda.graph`: the block whose kernels a graph records."""

    def __init__(
        self,
        cuda_graph: SimulatedGraph,
        pool: Pool | None = None,
        stream: Any = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph, self._pool, self._mode = cuda_graph, pool, capture_error_mode

    def __enter__(self) -> None:
        """Wait for the device, and begin."""
        torch.cuda.synchronize()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the capture; a failed one leaves no graph."""
        self._graph.capture_end()
        if kind is not None:
            self._graph.reset()
