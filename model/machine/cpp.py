"""Builds the C++ sources of the project at their first use, and declares what they share with Python.

The system's C++ compiler builds each one once per version of its files and options. The result is kept where torch
keeps its extensions (`TORCH_EXTENSIONS_DIR`). Functions and structs are declared once, in C++, and read from its
text, so that Python cannot disagree about an order or a type.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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


NUMBERS: dict[str, Any] = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "double": ctypes.c_double,
}
ELEMENTS = {
    "int64_t": np.int64,
    "int32_t": np.int32,
    "int8_t": np.int8,
    "uint8_t": np.uint8,
    "double": np.float64,
}
STRUCT = re.compile(r"^struct Shared \{$(.*?)^\};$", re.MULTILINE | re.DOTALL)
MEMBERS = re.compile(r"(?:const )?(\w+\*?) ([\w, ]+);")
FUNCTION = re.compile(r"^(\w+\*?) (\w+)\(([^)]*)\) \{", re.MULTILINE)


def declare_functions(library: ctypes.CDLL, source: str) -> None:
    """Give the functions of a library the types that the `extern "C"` block of its source declares."""
    for result, name, arguments in FUNCTION.findall(source.partition('extern "C" {')[2]):
        function = getattr(library, name)
        function.restype = None if result == "void" else _type(result)
        declared = (argument.split()[-2] for argument in arguments.split(","))
        function.argtypes = [_type(kind) for kind in declared]


def shared_struct(source: str, values: Mapping[str, float | np.ndarray]) -> ctypes.Structure:
    """Return the struct `Shared` that a C++ source declares, with these numbers and the addresses of these arrays.

    The caller keeps the arrays alive.

    Raises:
        TypeError: if the names or the dtypes of arrays are not the declared ones.
    """
    members = {
        name: kind
        for kind, names in MEMBERS.findall(re.sub(r"//.*", "", STRUCT.findall(source)[0]))
        for name in names.split(", ")
    }
    if members.keys() != values.keys():
        different = ", ".join(sorted(members.keys() ^ values.keys()))
        raise TypeError(f"struct Shared: {different} in Python or in C++ alone; allowed: in both")
    fields = [(name, _type(kind)) for name, kind in members.items()]
    shared: ctypes.Structure = type("Shared", (ctypes.Structure,), {"_fields_": fields})()
    for name, kind in members.items():
        value = values[name]
        if isinstance(value, np.ndarray):
            if not kind.endswith("*") or value.dtype != ELEMENTS[kind[:-1]]:
                raise TypeError(
                    f"struct Shared, {name}: got an array of {value.dtype}; allowed: {kind}"
                )
            value = value.ctypes.data
        setattr(shared, name, value)
    return shared


def _type(kind: str) -> Any:
    return ctypes.c_void_p if kind.endswith("*") else NUMBERS[kind]
