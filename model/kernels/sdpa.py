"""PyTorch's own attention on a GPU: cuDNN's is turned off, since it builds a plan for every length.

On GPUs of compute capability 9 and 10 PyTorch 2.13 prefers cuDNN to its flash and memory-efficient
kernels. cuDNN builds a plan, tens of milliseconds of work, for every number of keys it has not seen;
a text that is decoded has another one at every step. The switches are the process's: a command turns
cuDNN off for good, so that transformers' `generate` beside us runs without it too; the library, a
guest in the user's process, does so for its passes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def turn_off_cudnn(device: torch.device) -> None:
    """Turn cuDNN's attention off in this process if models will run on a GPU."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """Within the block cuDNN's attention is off if the device is a GPU.

    Another thread may use the switch meanwhile, for another model: whoever found it off does not
    touch it, so that it is on in the end if it was on before.
    """
    is_on = device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    if not is_on:
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def sdpa_backends(device: torch.device) -> str | None:
    """Return the attention that PyTorch may choose from on a GPU, such as "flash+efficient+math";
    None on other devices, where nothing can be switched.
    """
    if device.type != "cuda":
        return None
    switches: dict[str, Callable[[], bool]] = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
        "math": torch.backends.cuda.math_sdp_enabled,
    }
    return "+".join(name for name, is_on in switches.items() if is_on())
