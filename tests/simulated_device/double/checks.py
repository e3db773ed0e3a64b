"""Refuses tensors of two devices in one operation, as a GPU does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .accounts import place
from .errors import DeviceMismatch
from .operations import INDEXING, Operation


def check_devices(operation: Operation, device: torch.device) -> None:
    """Check that an operation's tensors are on its device; numbers and indices may be on the host.

    Raises:
        DeviceMismatch: naming devices, shapes and place.
    """
    indices = operation.indices if operation.name in INDEXING else []
    strangers = [
        tensor
        for tensor in operation.tensors
        if tensor.device != device
        and not (tensor.device.type == "cpu" and (tensor.ndim == 0 or _is_in(tensor, indices)))
    ]
    if strangers:
        raise _mismatch(operation.name, {device}, strangers)


def check_same(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check that all tensors are on one device.

    Raises:
        DeviceMismatch: as `check_devices`.
    """
    if any(tensor.device != tensors[0].device for tensor in tensors):
        raise _mismatch(name, set(), tensors)


def _mismatch(
    name: str, devices: set[torch.device], tensors: Sequence[torch.Tensor]
) -> DeviceMismatch:
    names = " and ".join(sorted(map(str, devices | {tensor.device for tensor in tensors})))
    shapes = [tuple(tensor.shape) for tensor in tensors]
    return DeviceMismatch(
        f"{name}: got tensors on {names} (shapes {shapes}) at {place()}; allowed: on one device"
    )


def _is_in(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)
