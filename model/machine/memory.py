"""How much memory a process may still take: the machine's, and what its container leaves of it (Linux)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

# Of a control group, by version of the interface: its limit, its use, and what of that gives way (files' pages).
CONTROL_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be taken without harm; 0 if the system does not say.

    Args:
        root: folder of `proc` and `sys`.
    """
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        # Beside unused pages those of files, which a model that was just read has filled many of.
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        machine = 1024 * int(available.split()[1])
    except (OSError, ValueError, StopIteration):
        return 0
    return max(0, min([machine, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group of this process leaves it."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller, limit, use, gives_way in CONTROL_GROUPS:
            if controller not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / controller
            group = top / path.strip("/")
            # A group has at most what those around it leave. Inside a container its own is the topmost.
            around = [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
            found = (_left_by(folder, limit, use, gives_way) for folder in around)
            yield from (left for left in found if left is not None)


def _left_by(folder: Path, limit: str, use: str, gives_way: str) -> int | None:
    """Return the bytes that a group leaves; None if it sets no limit, or is not to be seen."""
    try:
        most = float((folder / limit).read_text().strip().replace("max", "inf"))
        used = int((folder / use).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if math.isinf(most) else int(most) - used + int(stat.get(gives_way, 0))
