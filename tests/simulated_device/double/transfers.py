"""Pinned memory of the host, and copies that are under way while the host goes on.

A copy into pinned memory arrives at the next wait, not before: who reads too early reads old numbers, as on a
GPU. A copy from pinned memory may be read by the device at any time up to the next wait, so whoever writes
there before is told.
"""

from __future__ import annotations

import weakref

import torch

from .accounts import Place
from .errors import HostRace


class Transfers:
    """The pinned memory of the host and the copies under way."""

    def __init__(self) -> None:
        # By address, while a tensor is there.
        self._pinned: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._leaving: list[tuple[torch.Tensor, torch.Tensor, Place]] = []

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark a tensor's memory as pinned; return the tensor."""
        storage = tensor.untyped_storage()
        if storage.data_ptr():
            self._pinned[storage.data_ptr()] = storage
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host is in pinned memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def arrive_later(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy into pinned memory at the next wait."""
        self._arriving.append((target, source.clone()))

    def leave(self, source: torch.Tensor, where: Place) -> None:
        """Note a copy from pinned memory."""
        self._leaving.append((source, source.clone(), where))

    def finish(self) -> None:
        """End all copies under way.

        Raises:
            HostRace: if pinned memory was written meanwhile.
        """
        arriving, self._arriving = self._arriving, []
        leaving, self._leaving = self._leaving, []
        for target, numbers in arriving:
            target.copy_(numbers)
        for source, numbers, where in leaving:
            if not torch.equal(source.nan_to_num(), numbers.nan_to_num()):
                raise HostRace(
                    f"pinned memory: was written before the copy at {where} had ended; wait first, or use another"
                )
