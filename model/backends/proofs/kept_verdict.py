"""The key of a verdict that is kept for later starts: all that decides what a model computes on this machine.

These are the numbers of its weights, the model's code, the files of this package, the versions of what it imports,
and the machine. Functions of Python, torch and transformers are known by name and version. Code from elsewhere may
be other code by the same name at the next start: a model with such code is tested every time.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from ...kernels.short_pass import short_pass_kernel
from ...machine.packages import PACKAGE, versions

NAME = "proof"
# Packages whose versions, or files, are in the key.
KNOWN = {*sys.stdlib_module_names, "torch", "transformers", __name__.partition(".")[0]}
PLAIN = (
    bool,
    int,
    float,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.Size,
)


class _UnknownCode(Exception):
    """Code that has no version here."""


def verdict_key(
    settings: Sequence[str], code: Mapping[Hashable, Any], sums: Sequence[int]
) -> str | None:
    """Return the key of a verdict; None if it may not be kept.

    Args:
        settings: what else decides the passes, such as the key of the machine.
        code: of a `ModelSnapshot`.
        sums: of the numbers in the model's tensors.
    """
    found = hashlib.sha256(f"{settings} {versions()} {_own_files()} {short_pass_kernel()}".encode())
    try:
        for path, value in code.items():
            found.update(f"{_words(path)}: {_words(value)}\n".encode())
    except _UnknownCode:
        return None
    found.update(str([*sums]).encode())
    return found.hexdigest()[:32]


@cache
def _own_files() -> str:
    """Return a hash of the files of this package."""
    files = sorted(one for kind in ("py", "h", "cpp") for one in PACKAGE.rglob(f"*.{kind}"))
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def _words(value: Any) -> str:
    """Return a text that is equal for equal values in every process."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        is_set = len(value) == 2 and value[0] in (set, frozenset)
        words = sorted(map(_words, value[1])) if is_set else [*map(_words, value)]
        return f"({', '.join(words)})"
    if isinstance(value, weakref.ref):  # to a module of the model, which has a path of its own
        return "module"
    if isinstance(value, ModuleType):
        origin = name = value.__name__
    else:
        named = value if callable(value) and hasattr(value, "__qualname__") else type(value)
        origin, name = str(value.__module__), named.__qualname__
    if origin.partition(".")[0] not in KNOWN:
        raise _UnknownCode
    return f"{origin}.{name}"
