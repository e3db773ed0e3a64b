"""A file is the old one or all of the new one.

Run: pytest tests/model/machine/test_files.py
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model.machine.files import atomic_write


def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(file) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert file.read_text() == "old"
    with atomic_write(file) as temporary:
        temporary.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_the_content_is_on_the_disk_before_it_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the name after it, where the folder can be read."""
    file, done, sync = tmp_path / "a", [], os.fsync

    def noted(descriptor: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else file.exists())
        sync(descriptor)
        if done[-1] == "folder":
            raise OSError("this file system syncs no folders")

    monkeypatch.setattr("os.fsync", noted)
    with atomic_write(file) as temporary:
        temporary.write_text("new")
    assert done == [False, "folder"]
    assert file.read_text() == "new"


def test_threads_that_write_one_file_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "file"

    def write() -> None:
        with atomic_write(file) as temporary:
            temporary.write_text("thread")

    with ThreadPoolExecutor(1) as pool, atomic_write(file) as temporary:
        temporary.write_text("first")
        pool.submit(write).result()
        assert file.read_text() == "thread"
    assert file.read_text() == "first" and list(tmp_path.iterdir()) == [file]
