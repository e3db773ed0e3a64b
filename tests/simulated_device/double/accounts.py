"""Accounts of a simulated GPU: launches, copies, and waits of the host with their places in the project.

Tables are kept by file and function, so that they outlive edits; messages have the line, too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# Where installed packages are, which a checkout may hold.
PACKAGES = "site-packages"
# The launch of a graph.
REPLAY = "graph replay"
# Copies for others, who are the places that count; and the device itself.
COPIERS = {"model/machine/hardware.py", "tests/simulated_device/device.py"}


class Place(NamedTuple):
    """A place in the project.

    Attributes:
        file: relative to the project's root.
        function: in the file.
        line: of the file.
        library: file and line of a library that was called there, torch left out; empty if there is none.
    """

    file: str
    function: str
    line: int
    library: str = ""

    @property
    def name(self) -> str:
        """File and function: what tables are kept by."""
        return f"{self.file}:{self.function}"

    def __str__(self) -> str:
        within = f" (in {self.library})" if self.library else ""
        return f"{self.file}:{self.line} {self.function}{within}"


def place(left_out: Collection[str] = COPIERS) -> Place:
    """Return the innermost place in the project that led here, this package and some files left out."""
    frame, library = sys._getframe(1), ""
    root, here = f"{ROOT}/", f"{HERE}/"
    while frame is not None:
        path = frame.f_code.co_filename
        _, _, installed = path.partition(f"/{PACKAGES}/")
        if installed and not library and not installed.startswith("torch/"):
            library = f"{installed}:{frame.f_lineno}"
        file = path[len(root) :] if path.startswith(root) and not path.startswith(here) else ""
        if file and not installed and file not in left_out:
            return Place(file, frame.f_code.co_name, frame.f_lineno, library)
        frame = frame.f_back  # type: ignore[assignment]
    return Place("elsewhere", "", 0)


class Accounts:
    """Counters, all since the last `clear`.

    Attributes:
        launches: kernels by operation; a replayed graph is one.
        replayed_kernels: kernels within replayed graphs.
        waits: waits of the host for the device, by kind and place.
        copies: copies by direction ("H2D", "D2H", "D2D") and place.
        copied_bytes: bytes copied, by direction.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.launches = Counter[str]()
        self.replayed_kernels = 0
        self.waits = Counter[tuple[str, str]]()
        self.copies = Counter[tuple[str, str]]()
        self.copied_bytes = Counter[str]()

    @property
    def num_launches(self) -> int:
        """Launches of all operations."""
        return self.launches.total()

    @property
    def num_kernels(self) -> int:
        """Kernels that ran, by themselves or within graphs."""
        return self.num_launches - self.launches[REPLAY] + self.replayed_kernels

    @property
    def num_waits(self) -> int:
        """Waits of all kinds."""
        return self.waits.total()
