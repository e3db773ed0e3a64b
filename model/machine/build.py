"""Builds the C++ sources of the project at their first use.

The system's C++ compiler builds each one once per version of its files and options. The result is
kept where torch keeps its extensions (`TORCH_EXTENSIONS_DIR`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .files import atomic_write

logger = logging.getLogger(__name__)

BUILD_SECONDS = 300


class BuildError(Exception):
    """The code cannot be built here; the message says why in one line."""


def built(
    files: Sequence[Path],
    what: str,
    options: Sequence[str] = (),
    libraries: Sequence[str] = (),
    versions: str = "",
) -> Path:
    """Return the shared library of a C++ file; build it if needed.

    Args:
        files: the source, then the headers of the project that it includes.
        what: text for the log: what is built and about how long it takes.
        options: compiler options.
        libraries: compiler options for headers and libraries of others.
        versions: versions of these libraries.

    Raises:
        BuildError: if there is no compiler, or it fails.
        ImportError: if torch's extension tools cannot be imported.
        OSError: if the folder cannot be written.
    """
    # Imports setuptools, which takes a third of a second and is not always installed.
    from torch.utils import cpp_extension

    content = b"".join(file.read_bytes() for file in files) + f"{versions} {options}".encode()
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    name = f"{files[0].stem.replace('_', '-')}-{hashlib.sha256(content).hexdigest()[:12]}.so"
    library = Path(root) / "token-recycling" / name
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    compiler = cpp_extension.get_cxx_compiler()
    logger.info("building %s", what)
    try:
        # Another process may build at the same time and load what it finds.
        with atomic_write(library) as temporary:
            command = (
                *(compiler, "-O3", "-std=c++20", "-fPIC", "-shared", *options),
                *(str(files[0]), "-o", str(temporary), *libraries),
            )
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line]
                raise BuildError(f"{compiler} failed: {lines[0] if lines else done.returncode}")
    except FileNotFoundError as error:
        raise BuildError(
            f"no C++ compiler: got {compiler}; install g++, or name one as CXX"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {BUILD_SECONDS} s") from error
    return library
