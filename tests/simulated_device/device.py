"""Simulated GPUs on a machine without one.

Within the block of `SimulatedCuda`, tensors on "cuda:0", "cuda:1" and so on are tensors of the CPU in disguise
(`SimulatedTensor`). So code takes every branch that it takes on a GPU, its numbers are right, and what a GPU
refuses is refused: operations over two devices, numpy of its tensors, waits while a graph is captured.
Launches, copies and waits are counted (`accounts`).

Not simulated: time, streams that overlap, choice of kernels, compiled code, devices given as bare numbers (and so
`device_map="auto"` of transformers).

    with SimulatedCuda() as gpu:
        model.to("cuda")
        ...
        print(gpu.accounts.waits)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from .double.accounts import Accounts, place
from .double.checks import check_devices, check_same
from .double.errors import CaptureError
from .double.graph import Pool, Recording, Workspace
from .double.guard import load_guard
from .double.operations import COPIES, INDEXING, Operation, Traits, traits_of
from .double.stand_ins import stand_ins
from .double.tensor import SimulatedTensor, held_by, leaves, mapped
from .double.transfers import Transfers

NAME = "cuda"
CPU = torch.device("cpu")
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class SimulatedCuda(TorchDispatchMode):
    """Simulated GPUs, within a `with` block.

    Args:
        num_devices: how many there are.

    Attributes:
        accounts: of launches, copies and waits.
        index: the current device.
        recording: the capture under way, if any.
        pools: the recordings of each pool of graphs, in the order of their capture.
        workspace: that of products in the next capture; None: it takes its own.
    """

    is_simulated_device = True

    def __init__(self, num_devices: int = 2) -> None:
        super().__init__()
        self.num_devices, self.index = num_devices, 0
        self.accounts = Accounts()
        self.recording: Recording | None = None
        self.pools: dict[Pool | None, list[weakref.ref[Recording]]] = {}
        self.workspace: Workspace | None = None
        self._transfers = Transfers()
        self._traits: dict[Any, Traits] = {}
        self._block = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave operations unwrapped: no code is compiled here, and a wrapper is a tenth of their time."""
        return False

    def __enter__(self) -> SimulatedCuda:
        """Show the devices to torch."""
        if not torch.cuda.is_available():
            load_guard()
        self._block.enter_context(stand_ins(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave torch as it was."""
        super().__exit__(*error)
        self._block.close()

    def clear_workspaces(self) -> None:
        """Free the memory of products."""
        if self.workspace is not None:
            self.workspace.is_freed = True
        self.workspace = None

    def new_pool(self) -> Pool:
        """Return a pool of graphs that no one has."""
        pool = (0, len(self.pools) + 1)
        self.pools[pool] = []
        return pool

    def wait(self, kind: str) -> None:
        """Note that the host waits for the device.

        Raises:
            CaptureError: while a graph is captured.
            HostRace: if pinned memory was written before a copy from it had ended.
        """
        where = place()
        if self.recording is not None:
            raise CaptureError(f"{kind}: at {where}; not allowed while a graph is captured")
        self.accounts.waits[kind, where.name] += 1
        self._transfers.finish()

    def refuse_numpy(self, tensor: torch.Tensor) -> None:
        """Raise TypeError as torch does, with the place."""
        raise TypeError(
            f"numpy: got a tensor on {tensor.device} at {place()}; allowed: on the cpu; call cpu() first"
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        return self.execute(func, args, kwargs or {})

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation where its tensors are."""
        traits = self._traits.get(func) or self._traits.setdefault(func, traits_of(func))
        if traits.is_composite:  # in inference mode they come whole
            _push_mode(self)
            try:
                # As torch runs it: `decompose` takes several times as long where Python code traces it.
                return func._op_dk(COMPOSITE, *args, **kwargs)
            finally:
                _pop_mode()
        operation = Operation(func, traits, args, kwargs)
        asked = kwargs.get("device")
        asked = self._indexed(torch.device(asked)) if asked is not None else None
        if not operation.ours and (asked is None or asked.type != NAME):
            return self._on_host(operation)
        if traits.name in COPIES:
            return self._copy(operation, asked)
        device = asked or next((t for t in operation.ours if t.ndim), operation.ours[0]).device
        if operation.ours:
            check_devices(operation, device)
        self._note(operation)
        return self._run(operation, device)

    def run_one_kernel(self, name: str, call: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Run a function of torch that is one kernel on a GPU, such as attention.

        Raises:
            DeviceMismatch: if its tensors are on two devices.
        """
        tensors = [value for value in leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        check_same(name, tensors)
        self._launch(name)
        args, kwargs = mapped(held_by, (args, kwargs))
        with torch._C._DisableTorchDispatch():
            result = self._call(call, args, kwargs)
        return self._shown(result, tensors[0].device)

    def run_written(self, name: str, call: Callable[..., None], tensors: Sequence[Any]) -> None:
        """Run a kernel of ours, which may write to any of its tensors.

        Raises:
            DeviceMismatch: if its tensors are on two devices.
        """
        check_same(name, list(tensors))
        self._launch(name)
        held = [held_by(tensor) for tensor in tensors]
        with torch._C._DisableTorchDispatch():
            self._call(call, held, {}, held)

    def _on_host(self, operation: Operation) -> Any:
        """Run an operation of the CPU; what asks for pinned memory is marked."""
        name, kwargs = operation.name, dict(operation.kwargs)
        if name == "is_pinned":
            return self._transfers.is_pinned(operation.args[0])
        if name in ("_pin_memory", "pin_memory"):
            return self._transfers.pin(operation.args[0].clone())
        is_pinned = kwargs.pop("pin_memory", False)
        result = operation.func(*operation.args, **kwargs)
        return self._transfers.pin(result) if is_pinned else result

    def _note(self, operation: Operation) -> None:
        """Count an operation that is no copy."""
        if operation.ours and operation.waits:
            self.wait(operation.name)
        elif operation.name in INDEXING:
            for index in operation.indices:
                if index.device.type == "cpu":
                    self._count_copy("H2D", index)
                    self.wait("H2D copy of an index")
                elif index.dtype == torch.bool:
                    self.wait("index by a mask")
        if operation.launches:
            self._launch(operation.name)

    def _launch(self, name: str) -> None:
        if self.recording is not None:
            self.recording.num_kernels += 1
        else:
            self.accounts.launches[name] += 1

    def _count_copy(self, direction: str, source: torch.Tensor) -> None:
        self.accounts.copies[direction, place().name] += 1
        self.accounts.copied_bytes[direction] += source.numel() * source.element_size()

    def _copy(self, operation: Operation, asked: torch.device | None) -> Any:
        """Run a copy, maybe to another device."""
        args, kwargs = operation.args, operation.kwargs
        is_new = operation.name == "_to_copy"
        source = args[0] if is_new else args[1]
        device = (asked or source.device) if is_new else args[0].device
        is_async = bool(kwargs.get("non_blocking", len(args) > 2 and not is_new and args[2]))
        directions = {(False, True): "H2D", (True, False): "D2H", (True, True): "D2D"}
        direction = directions[source.device.type == NAME, device.type == NAME]
        if source.device == device:
            self._launch(operation.name)
        else:
            self._count_copy(direction, source)
        if direction == "D2H":
            return self._to_host(operation, source, is_async)
        if direction == "H2D":
            if is_async and self._transfers.is_pinned(source):
                self._launch_transfer()
                self._at_each_run(self._transfers.leave, source, place())
            else:
                self.wait("H2D copy")
        return self._run(operation, device)

    def _to_host(self, operation: Operation, source: SimulatedTensor, is_async: bool) -> Any:
        """Copy from a device: at once, or into pinned memory while the host goes on."""
        is_new = operation.name == "_to_copy"
        target = None if is_new else operation.args[0]
        if not is_async or (target is not None and not self._transfers.is_pinned(target)):
            self.wait("D2H copy")
            return self._run(operation, CPU)
        self._launch_transfer()
        if target is None:
            kwargs = {**operation.kwargs, "device": CPU}
            arrived = operation.func(source.held, **kwargs)
            target = self._transfers.pin(torch.zeros_like(arrived))
        self._at_each_run(self._transfers.arrive_later, target, source.held)
        return target

    def _at_each_run(self, call: Callable[..., None], *args: Any) -> None:
        """Call now, or at each replay of the graph that is captured."""
        if self.recording is not None:
            self.recording.run_later(call, args)
        else:
            call(*args)

    def _launch_transfer(self) -> None:
        """Count a copy beside the host as a node of the graph that records it."""
        if self.recording is not None:
            self.recording.num_kernels += 1

    def _run(self, operation: Operation, device: torch.device) -> Any:
        """Run an operation on the tensors of the CPU and show its results on the device."""
        kwargs = dict(operation.kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU if device.type == NAME else device
        kwargs.pop("pin_memory", None)
        args, kwargs = mapped(held_by, (tuple(operation.args), kwargs))
        func = operation.func
        if operation.name == "histc" and not args[0].is_floating_point():
            func = _histogram_of_integers  # which a CPU does not count
        if func == torch.ops.aten.bmm.dtype:
            func = _wide_products  # which a CPU has not
        written = [held_by(tensor) for tensor in operation.written] if self.recording else []
        result = self._call(func, args, kwargs, written, operation.launches)
        known = {id(held_by(value)): value for value in operation.tensors}

        def shown(value: Any) -> Any:
            if id(value) in known:  # written in place
                return known[id(value)]
            return self._shown(value, device)

        return mapped(shown, result)

    def _call(
        self,
        call: Any,
        args: Any,
        kwargs: dict[str, Any],
        written: list[torch.Tensor] | None = None,
        is_kernel: bool = True,
    ) -> Any:
        if self.recording is None:
            return call(*args, **kwargs)
        return self.recording.run(call, args, kwargs, written or [], is_kernel)

    def _shown(self, value: Any, device: torch.device) -> Any:
        """Return a tensor of the CPU as one on the device."""
        if not isinstance(value, torch.Tensor) or device.type != NAME:
            return value
        tensor = SimulatedTensor(value, device)
        if self.recording is not None:
            self.recording.made(tensor)
        return tensor

    def _indexed(self, device: torch.device) -> torch.device:
        """Return a device with its index."""
        is_open = device.type == NAME and device.index is None
        return torch.device(NAME, self.index) if is_open else device


def _histogram_of_integers(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.histc(values.float(), *args, **kwargs).to(values.dtype)


def _wide_products(
    rows: torch.Tensor, columns: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    return torch.bmm(rows.to(out_dtype), columns.to(out_dtype))
