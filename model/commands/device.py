"""The device `auto`: a GPU if torch can use one, else the CPU; a GPU that torch cannot use is an error.

A large model that silently runs on the CPU looks like a slow program. The usual cause is a driver older
than the CUDA that torch was built for, which torch says in a warning that is easily lost.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import torch

from .command_line import UserError

DRIVER_FILE = Path("/proc/driver/nvidia/version")
DEVICE_FILES = Path("/dev")
# Values of CUDA_VISIBLE_DEVICES by which people, Ray and Slurm say that no GPU is to be used.
HIDDEN = ("", "-1", "NoDevFiles")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
SMI_SECONDS = 20.0


def auto_device() -> str:
    """Return "cuda" if torch can use a GPU, "cpu" if there is none or all are hidden.

    Raises:
        UserError: if a GPU is here that torch cannot use.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return "cuda"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return "cpu"
    driver = nvidia_driver()
    if driver is None:
        return "cpu"
    # What follows the first sentence is advice, and the line of torch that warned.
    said = [str(warning.message).split(". ")[0] for warning in caught]
    if torch.version.cuda is None:
        said = ["it is built without CUDA"]
    cause = said[0] if said else f"it is built with CUDA {torch.version.cuda}"
    raise UserError(
        f"device: got auto, but torch {torch.__version__} cannot use the NVIDIA GPU that is here "
        f"(driver {driver}): {cause}; install a torch built for that driver (https://pytorch.org lists the "
        "package indexes of older CUDA versions), or give --device cpu (eval.sh: DEVICES=cpu)"
    )


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype `auto` of the weights on a device: float32 on a CPU, float16 elsewhere."""
    return torch.float32 if device.type == "cpu" else torch.float16


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver, or "of unknown version"; None if there is no GPU with one.

    A container sees its host's driver file also where it was given no GPU, so that alone says nothing.
    """
    if shutil.which(NVIDIA_SMI[0]):
        try:
            asked = subprocess.run(
                NVIDIA_SMI, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            asked = None
        if asked and asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.split()[0]
    if not any(DEVICE_FILES.glob("nvidia[0-9]*")):
        return None
    try:
        text = DRIVER_FILE.read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return version[0] if version else "of unknown version"
