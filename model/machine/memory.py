"""Memory that a process may still take: the machine's, or less if its container sets a limit (Linux)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

# Files of a control group, for cgroup v2 and v1: controller, limit, use, reclaimable file pages.
CONTROL_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated safely; 0 if the system does not say.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        # Counts reclaimable file pages too; a model that was just read fills many of them.
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        machine = 1024 * int(available.split()[1])
    except (OSError, ValueError, StopIteration):
        return 0
    return max(0, min([machine, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group still allows this process."""
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
            # Parent groups limit a group too. Inside a container, its own group is the topmost.
            around = [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
            found = (_left_by(folder, limit, use, gives_way) for folder in around)
            yield from (left for left in found if left is not None)


def _left_by(folder: Path, limit: str, use: str, gives_way: str) -> int | None:
    """Return the bytes that a group still allows; None if it sets no limit or cannot be read."""
    try:
        most = float((folder / limit).read_text().strip().replace("max", "inf"))
        used = int((folder / use).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if math.isinf(most) else int(most) - used + int(stat.get(gives_way, 0))
