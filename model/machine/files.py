"""Atomic file writes, fingerprints, and what is kept on disk: what was found on this machine, and compiled C++.

After a crash a file is the old one or all of the new one. Measured times, and self-tests that were passed, are one
JSON file per model, device, dtype and number of threads, in the folder `TOKEN_RECYCLING_CACHE`, by default
`token-recycling` in the user's cache folder. Delete a file there to measure or test again.

The wheel of a platform carries the C++ libraries in `PREBUILT`. What is not there is built by the system's compiler
at its first use, once per version of its files and options, where torch keeps its extensions
(`TORCH_EXTENSIONS_DIR`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
BUILD_SECONDS = 300
PREBUILT = Path(__file__).parents[1] / "prebuilt"


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield the path to write a file's new content to; it takes the file's name when the block ends.

    If the block fails, or the file cannot be replaced (OSError), the old one is as it was.
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


def refuse_lfs_pointer(file: str | Path, what: str) -> None:
    """Raise ValueError, its text beginning with `what`, if a file is what Git leaves in place of one not fetched.

    A file that cannot be read is left to its reader.
    """
    try:
        with open(file, "rb") as content:
            begin = content.read(len(LFS_POINTER))
    except OSError:
        return
    if begin == LFS_POINTER:
        raise ValueError(f"{what}: is a Git LFS pointer, not the file itself; run git lfs pull")


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


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BuildError(Exception):
    """The code cannot be built here; the message says why in one line."""


def built(
    files: Sequence[Path],
    what: str,
    options: Sequence[str] = (),
    libraries: Callable[[], Sequence[str]] = tuple,
    versions: str = "",
) -> Path:
    """Return the shared library of a C++ file, a wheel's or this machine's; build it if needed.

    Args:
        files: the source, then the headers of the project that it includes.
        what: text for the log: what is built and about how long it takes.
        options: compiler options.
        libraries: returns compiler options for headers and libraries of others.
        versions: versions of these libraries.

    Raises:
        BuildError: if there is no compiler, or it fails.
        ImportError: if torch's extension tools cannot be imported.
        OSError: if the folder cannot be written.
    """
    content = b"".join(file.read_bytes() for file in files) + f"{versions} {options}".encode()
    name = f"{files[0].stem.replace('_', '-')}-{hashlib.sha256(content).hexdigest()[:12]}.so"
    if (PREBUILT / name).exists():
        return PREBUILT / name
    # Imports setuptools, which takes a third of a second and is not always installed.
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    library = Path(root) / "token-recycling" / name
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    compiler = cpp_extension.get_cxx_compiler()
    if not shutil.which(compiler):
        raise BuildError(f"no C++ compiler: got {compiler}; install g++, or name one as CXX")
    logger.info("building %s", what)
    try:
        # Another process may build at the same time and load what it finds.
        with atomic_write(library) as temporary:
            command = (
                *(compiler, "-O3", "-std=c++20", "-fPIC", "-shared", *options),
                *(str(files[0]), "-o", str(temporary), *libraries()),
            )
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line]
                raise BuildError(f"{compiler} failed: {lines[0] if lines else done.returncode}")
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {BUILD_SECONDS} s") from error
    return library
