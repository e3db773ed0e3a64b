"""Copies between host and device that make the host wait as rarely as possible.

A copy to a GPU from ordinary memory makes the host wait for everything that the GPU has been given so
far. From page-locked (pinned) memory it is one more entry in the GPU's queue.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


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
