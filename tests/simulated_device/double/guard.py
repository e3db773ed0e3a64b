"""The device guard of simulated GPUs, which copies and indexing ask for, on a machine without a real one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch.utils import cpp_extension

from model.machine.files import built

SOURCE = Path(__file__).with_name("guard.cpp")


def load_guard() -> None:
    """Load the guard of CUDA devices, built at the first call; once in a process is enough.

    Raises:
        BuildError: if it cannot be built.
    """
    libraries = (
        *(f"-isystem{folder}" for folder in cpp_extension.include_paths()),
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        "-lc10",
    )
    what = "the guard of simulated devices (once, about 3 s)"
    ctypes.CDLL(str(built([SOURCE], what, (), lambda: libraries, torch.__version__)))
