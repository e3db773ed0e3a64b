"""The key of a verdict that is kept for later starts: all that decides what a model computes on this machine.

These are the numbers of its weights, the model's code, the files of this package, the versions of what it imports,
and the machine. Functions of Python, torch and transformers are known by name and version. Code from elsewhere may
be other code by the same name at the next start: a model with such code is tested every time. So is a model whose
family torch.compile wrote into: what it makes has no name of its own.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any

import torch

from ...kernels.short_pass import short_pass_kernel
from ...machine.packages import PACKAGE, versions
from .snapshot import PLAIN

NAME = "proof"
# Packages whose versions, or files, are in the key.
KNOWN = {*sys.stdlib_module_names, "torch", "transformers", __name__.partition(".")[0]}
CONSTANT = (*PLAIN, torch.layout, torch.Size)


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
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _words(value: Any, around: tuple[int, ...] = ()) -> str:
    """Return a text that is equal for equal values in every process; functions within a function are part of it."""
    if isinstance(value, CONSTANT):
        return repr(value)
    if isinstance(value, tuple | list):
        is_set = len(value) == 2 and value[0] in (set, frozenset)
        words = [_words(one, around) for one in (value[1] if is_set else value)]
        return f"({', '.join(sorted(words) if is_set else words)})"
    if isinstance(value, weakref.ref):  # to a module of the model, which has a path of its own
        return "module"
    within: list[Any] = []
    if isinstance(value, ModuleType):
        origin = name = value.__name__
    elif isinstance(value, FunctionType):
        # Not its __module__, which a decorator copies from what it stands for.
        origin, name = str(value.__globals__.get("__name__")), value.__qualname__
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                within.append(cell.cell_contents)
    else:
        named = value if callable(value) and hasattr(value, "__qualname__") else type(value)
        origin, name = str(value.__module__), named.__qualname__
        if isinstance(value, partial):
            within = [value.func, *value.args, *value.keywords.values()]
        elif hasattr(value, "__wrapped__"):
            within = [value.__wrapped__]
    if origin.partition(".")[0] not in KNOWN:
        raise _UnknownCode
    around = (*around, id(value))
    new = [one for one in within if callable(one) and id(one) not in around]  # one may hold itself
    return f"{origin}.{name}{[_words(one, around) for one in new] or ''}"
