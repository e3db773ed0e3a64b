"""What a tree of objects holds, such as a model's modules: recorded once, compared in some ten microseconds.

Objects are compared by their addresses (`held_objects.h`), so that nothing that was recorded is looked at but
what is still in its place. Without the compiled kernels Python compares, in about a hundred times as long.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import torch

from .short_pass import kernel_library, short_pass_kernel

# What an address is followed by, in its lowest bits, as in held_objects.h.
DICT, OBJECT, LIST, TENSOR = 1, 2, 3, 4
_data_ptr = torch.Tensor.data_ptr


class HeldObjects:
    """The objects that some roots hold, at one time.

    Dicts and lists are followed, and instances of `followed` by their class and attributes, each once; all else is
    compared by identity. Values that are not tensors, and not followed, are kept alive.

    Args:
        roots: dicts, lists or instances of `followed`.
        followed: classes of objects that are followed.
        ignored: names of attributes, or keys, whose values may change.
        note: called with the path and the value of all that is not a dict, list or ignored.

    Attributes:
        addresses: where the numbers of the tensors are.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        followed: tuple[type, ...],
        ignored: Collection[str] = (),
        note: Callable[[tuple[Any, ...], Any], object] = lambda path, value: None,
    ) -> None:
        self._roots = list(roots)
        self._recording = (followed, ignored)
        recorder = _Recorder(followed, ignored, note)
        recorder.all(self._roots)
        self._recorded, self._kept = recorder.recorded, recorder.kept
        self._at = self._recorded.buffer_info()[0]
        self.addresses = [_data_ptr(tensor) for tensor in recorder.tensors]

    def are_same(self) -> bool:
        """Whether the roots still hold the same objects, and their tensors the same memory."""
        tensors: list[torch.Tensor] = []
        if (library := _compiled()) is not None:
            is_same = bool(library.token_recycling_holds(self._roots, self._at, tensors))
        else:
            now = _Recorder(*self._recording, lambda path, value: None)
            now.all(self._roots)
            is_same, tensors = now.recorded == self._recorded, now.tensors
        return is_same and [*map(_data_ptr, tensors)] == self.addresses


class _Recorder:
    """Follows the objects level by level, as the compiled comparison does."""

    def __init__(self, followed: tuple[type, ...], ignored: Collection[str], note: Any) -> None:
        self.recorded = array("q")
        self.kept: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self._followed, self._ignored, self._note = followed, ignored, note
        self._seen: set[int] = set()
        self._next: deque[tuple[Any, tuple[Any, ...]]] = deque()

    def all(self, roots: Sequence[Any]) -> None:
        self._next.append((roots, ()))
        while self._next:
            found, path = self._next.popleft()
            if isinstance(found, list):
                self.recorded.append(len(found))
                for index, value in enumerate(found):
                    self._value(value, (*path, index))
            elif isinstance(found, dict):
                self._entries(found, path)
            else:
                self.recorded.append(id(type(found)))
                self._next.append((vars(found), path))

    def _entries(self, values: dict[Any, Any], path: tuple[Any, ...]) -> None:
        # An OrderedDict has an order of its own, which the compiled comparison does not see.
        entries = zip(_places(values), dict.items(values), strict=True)
        kept = [(at, name, value) for at, (name, value) in entries if name not in self._ignored]
        self.recorded.extend((len(values), len(kept)))
        for at, name, value in kept:
            self.recorded.extend((at, id(name)))
            self.kept.append(name)
            self._value(value, (*path, name))

    def _value(self, value: Any, path: tuple[Any, ...]) -> None:
        at, kind = id(value), 0
        if type(value) in (dict, OrderedDict, list):
            kind = LIST if type(value) is list else DICT
        else:
            self._note(path, value)
            if isinstance(value, self._followed):
                kind = OBJECT
            elif not isinstance(value, torch.Tensor):
                self.kept.append(value)
            elif _has_memory(value):
                kind = TENSOR
                self.tensors.append(value)
        if kind in (DICT, OBJECT, LIST):
            if at in self._seen:
                kind = 0
            else:
                self._seen.add(at)
                self._next.append((value, path))
        self.recorded.append(at | kind)


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:  # of a kind without any
        return False
    return True


def _places(values: dict[Any, Any]) -> Sequence[int]:
    """Return where the entries of a dict are, as Python's interface for C counts."""
    if (library := _compiled()) is None:
        return range(len(values))
    places = array("q", bytes(8 * (len(values) + 1)))
    library.token_recycling_places(values, places.buffer_info()[0])
    return places[:-1]


@cache
def _compiled() -> Any:
    """Return the compiled functions; None without the kernels."""
    if not short_pass_kernel():
        return None
    library = ctypes.PyDLL(str(kernel_library()))
    library.token_recycling_holds.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.py_object)
    library.token_recycling_places.argtypes = (ctypes.py_object, ctypes.c_void_p)
    library.token_recycling_places.restype = None
    return library
