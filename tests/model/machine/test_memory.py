"""Free memory is the machine's, or that of its container if less.

Run: pytest tests/model/machine/test_memory.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from model.machine.memory import free_memory

VERSION_2 = ("", "memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8,000 KiB to give."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemFree: 100 kB\nMemAvailable:    8000 kB\n")
    return tmp_path


def limit(root: Path, version: tuple[str, ...], path: str, most: str, used: int, file: int) -> None:
    """Give a control group a limit; `file` of what it uses gives way."""
    controller, *names = version
    folder = root / "sys/fs/cgroup" / controller / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {file}\n")


def test_without_limits_it_is_the_machines(root: Path, tmp_path: Path) -> None:
    assert free_memory(root) == 8000 * 1024
    (root / "proc/self/cgroup").write_text("0::/user\n")
    limit(root, VERSION_2, "user", "max", 1000, 0)
    assert free_memory(root) == 8000 * 1024
    assert free_memory(tmp_path / "elsewhere") == 0


@pytest.mark.parametrize(
    ("version", "line"), [(VERSION_2, "0::/a/b"), (VERSION_1, "4:cpu,memory:/a/b")]
)
@pytest.mark.parametrize("path", ["a/b", "a", ""])
def test_a_containers_limit_counts(
    root: Path, version: tuple[str, ...], line: str, path: str
) -> None:
    (root / "proc/self/cgroup").write_text(f"1:cpu:/\n{line}\n")
    limit(root, version, path, "5000", 3000, 500)
    assert free_memory(root) == 2500
    limit(root, version, path, "5000", 6000, 500)
    assert free_memory(root) == 0


def test_this_machine_says() -> None:
    assert free_memory() > 2**20
