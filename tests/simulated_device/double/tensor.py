"""A tensor that says it is on a GPU and computes with a tensor of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

NESTS = (list, tuple, dict)
# One kernel on a GPU; this build of torch has none, or makes them of other operations.
ONE_KERNEL = {
    torch.nn.functional.scaled_dot_product_attention: "attention",
    torch.nn.functional.rms_norm: "rms_norm",
    torch.rms_norm: "rms_norm",
}
# What a simulated tensor has none of.
ADDRESSES = (torch.Tensor.data_ptr, torch.Tensor.untyped_storage)


def active_device() -> Any:
    """Return the simulated device of the innermost `with` block.

    Raises:
        RuntimeError: if there is none in this thread.
    """
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if getattr(mode, "is_simulated_device", False):
            return mode
    raise RuntimeError(
        "simulated device: used outside of its block; allowed: inside, and in the same thread"
    )


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated device.

    Attributes:
        held: the tensor of the CPU that holds its numbers.
    """

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> SimulatedTensor:
        """Return a tensor of the same shape and strides on the device."""
        # A view of a tensor made outside of inference mode is none of its own.
        if held.is_inference() != torch.is_inference_mode_enabled():
            with torch.inference_mode(held.is_inference()):
                return cls(held, device)
        tensor: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=device,
            requires_grad=held.requires_grad,
        )
        tensor.held = held
        return tensor

    def __init__(self, held: torch.Tensor, device: torch.device) -> None: ...

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.held!r}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the simulated device."""
        return active_device().execute(func, args, kwargs or {})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer what never becomes an operation, or one that this build of torch lacks."""
        kwargs = kwargs or {}
        if func in ONE_KERNEL:
            return active_device().run_one_kernel(ONE_KERNEL[func], func, args, kwargs)
        if func is torch.Tensor.tolist:
            active_device().wait("tolist")
            return args[0].held.tolist()
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            return active_device().refuse_numpy(args[0])
        if func in ADDRESSES:
            return func(args[0].held)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Do what `tensor.data = value` does, which moves a parameter to a device."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    if isinstance(value, SimulatedTensor) or isinstance(tensor, SimulatedTensor):
        plain: type[torch.Tensor] = torch.nn.Parameter if is_parameter else torch.Tensor
        tensor.__class__ = SimulatedTensor if isinstance(value, SimulatedTensor) else plain
        tensor.__dict__["_is_param"] = is_parameter
    torch._C.TensorBase.data.__set__(tensor, value)  # type: ignore[attr-defined]
    if isinstance(value, SimulatedTensor):
        tensor.__dict__["held"] = value.held


def held_by(value: Any) -> Any:
    """Return the tensor of the CPU behind a simulated one; anything else as it is."""
    return value.held if isinstance(value, SimulatedTensor) else value


def leaves(value: Any) -> list[Any]:
    """Return the contents of lists, tuples and dicts; torch's own function takes several times as long."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return [value]
    found = []
    for each in value:
        if isinstance(each, NESTS):
            found += leaves(each)
        else:
            found.append(each)
    return found


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same lists, tuples and dicts with what the function makes of their leaves."""
    if isinstance(value, dict):
        return {key: mapped(function, each) for key, each in value.items()}
    if not isinstance(value, NESTS):
        return function(value)
    # A call for each leaf would take half of the time.
    return type(value)(
        [mapped(function, each) if isinstance(each, NESTS) else function(each) for each in value]
    )
