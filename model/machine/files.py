"""Atomic file writes: after a crash a file is the old one or all of the new one. Fingerprints of files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield the path to write a file's new content to; it takes the file's name when the block ends.

    If the block fails, the old file is as it was.

    Raises:
        OSError: if the file cannot be replaced.
    """
    # The same folder: a rename is atomic only within one file system.
    writer = f"{os.getpid()}-{threading.get_ident()}"
    temporary = file.with_name(f"{file.name}.{writer}.tmp")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, file)
        with suppress(OSError):  # a folder that may be written, but not read
            _sync(file.parent)
    finally:
        temporary.unlink(missing_ok=True)


def written_state(path: str | Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return a fingerprint that changes when the file, or a file in the folder, is rewritten; () if unreadable."""
    path = Path(path)
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        states = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError:
        return ()
    return tuple((name, at.st_ino, at.st_mtime_ns, at.st_size) for name, at in states)


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
