"""Bytes that an object holds: everything that can be reached from it, each thing once.

Arrays and tensors count with their whole block of memory, Python's objects with what the interpreter
says. Classes, functions and modules are shared by all objects, and libraries hold memory that Python
cannot see: neither counts.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import types
from typing import Any

import numpy as np
import torch

SHARED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    ctypes.CDLL,
)


def held_bytes(root: Any, apart_from: Any = None) -> int:
    """Return the bytes held by an object, without what another one holds as well."""
    seen: set[int] = set()
    blocks: dict[int, int] = {}  # address of an array's memory -> its bytes: tensors may share it
    _visit(apart_from, seen, blocks)
    outside = sum(blocks.values())
    return _visit(root, seen, blocks) + sum(blocks.values()) - outside


def _visit(root: Any, seen: set[int], blocks: dict[int, int]) -> int:
    """Add all arrays that can be reached to the blocks; return the bytes of everything else."""
    total = 0
    to_visit = [root]
    while to_visit:
        item = to_visit.pop()
        if id(item) in seen or isinstance(item, SHARED):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, np.ndarray):
            owner = _owner(item)
            address = owner.ctypes.data
            blocks[address] = max(owner.nbytes, blocks.get(address, 0))
        else:
            total += sys.getsizeof(item)
            to_visit += gc.get_referents(item)
    return total


def _owner(array: np.ndarray) -> np.ndarray:
    """Return the array whose memory a view shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
