"""Measurements of this machine, kept on disk: one JSON file per model, device, dtype and number of
threads. The folder is `TOKEN_RECYCLING_CACHE`, by default `token-recycling` in the user's cache
folder. Delete a file there to measure again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .files import atomic_write


def read_measured(name: str, key: str) -> Any:
    """Return the content of a file; None if there is none, or it is not JSON."""
    try:
        return json.loads(_file(name, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_measured(name: str, key: str, content: object) -> None:
    """Keep `content` for later runs; if the folder cannot be written, they measure again."""
    try:
        file = _file(name, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError:
        pass


def machine_key(facts: Sequence[str], device: torch.device, dtype: torch.dtype) -> str:
    """Return a hash of everything that the time of a model's pass depends on: machine and model facts."""
    parts = (
        *facts,
        f"{device} {device_name(device)} {torch.backends.cpu.get_cpu_capability()}",
        f"{platform.machine()} {os.cpu_count()} {torch.get_num_threads()}",
        f"{dtype} {torch.__version__}",
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """Return the name of the hardware behind a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"cpu ({name})"


def _file(name: str, key: str) -> Path:
    """Return the file of a measurement; OSError if there is no folder for it."""
    folder = os.environ.get("TOKEN_RECYCLING_CACHE")
    if folder:
        return Path(folder) / f"{name}-{key}.json"
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError("the user has no home folder") from error
    return Path(base) / "token-recycling" / f"{name}-{key}.json"
