"""CUDA graphs: record the kernels that a call launches, and launch them again without the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Captured(NamedTuple):
    """A captured call and its output, whose tensors every replay overwrites."""

    graph: torch.cuda.CUDAGraph
    output: Any


def captured(call: Callable[[], Any], device: torch.device, pool: Any = None) -> Captured:
    """Capture a call without executing it; it must have run once before.

    Args:
        call: launches kernels on the device, and does nothing else.
        device: a GPU.
        pool: memory that is shared with other graphs, from `torch.cuda.graph_pool_handle`; None: its own.

    Raises:
        RuntimeError: if it does what a graph cannot hold, such as waiting for the device.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device meanwhile.
    recording = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    with torch.cuda.device(device), recording:
        output = call()
    return Captured(graph, output)
