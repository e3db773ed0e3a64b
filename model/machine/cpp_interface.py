"""The functions and the struct that a C++ source shares with Python, read from its text.

So each is declared once, in C++, and Python cannot disagree about an order or a type.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

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
    """Return the struct `Shared` that a C++ source declares, with these numbers and arrays.

    The struct holds the addresses of the arrays; the caller keeps the arrays alive.

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
        setattr(shared, name, _member(name, kind, values[name]))
    return shared


def _type(kind: str) -> Any:
    return ctypes.c_void_p if kind.endswith("*") else NUMBERS[kind]


def _member(name: str, kind: str, value: float | np.ndarray) -> float:
    if not isinstance(value, np.ndarray):
        return value
    if not kind.endswith("*") or value.dtype != ELEMENTS[kind[:-1]]:
        raise TypeError(f"struct Shared, {name}: got an array of {value.dtype}; allowed: {kind}")
    return value.ctypes.data
