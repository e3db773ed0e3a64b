"""Replaces functions of a model within a block, for the thread of that block alone.

A model's modules are shared by all threads. While a pass of ours runs in one thread, others may run the
same model as it is: plain generation, training, another decoder's self-test. So what stands in a module
meanwhile asks in which thread it is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class _Thread(threading.local):
    is_in_pass: bool | None = None


_THREAD = _Thread()


def is_in_pass() -> bool | None:
    """Whether this thread uses what stands in place of a model's functions; False: not now, but in a pass."""
    return _THREAD.is_in_pass


@contextmanager
def in_pass(is_in: bool = True) -> Iterator[None]:
    """Within the block this thread uses what stands in place of a model's functions, or not, as in a hook."""
    before = _THREAD.is_in_pass
    _THREAD.is_in_pass = True if is_in else before and False
    try:
        yield
    finally:
        _THREAD.is_in_pass = before


class OwnForward:
    """A function in place of a module's forward in passes of this thread; all others call the module's own."""

    __slots__ = ("_function", "_module", "_own")

    def __init__(self, module: nn.Module, function: Forward) -> None:
        self._module = module
        self._function = function
        self._own: Forward = module.forward

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function, or the module's own forward outside a pass of this thread."""
        return (self._function if _THREAD.is_in_pass else self._own)(*arguments, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy as the module's own forward: other threads may copy or save a model while a pass runs."""
        return getattr, (self._module, "forward")


class OwnForwards:
    """Functions by module, in place of its forward; with `replaces_users` also of one that was set on it itself."""

    def __init__(
        self, functions: Mapping[nn.Module, Forward], replaces_users: bool = False
    ) -> None:
        self._functions = dict(functions)
        self._replaces_users = replaces_users
        self._own = {module: OwnForward(module, one) for module, one in functions.items()}

    @classmethod
    def joined(cls, parts: Iterable[OwnForwards]) -> OwnForwards:
        """Return the functions of all parts, which have different modules, as one."""
        joined = cls({})
        for part in parts:
            joined._functions |= part._functions
            joined._own |= part._own
        return joined

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._own)

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnForwards, (self._functions, self._replaces_users)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Within the block these modules compute with these functions in this thread."""
        if not self._own:
            yield
            return
        users: dict[nn.Module, Forward] = {}
        # Bypasses `nn.Module.__setattr__`, which takes longer than a small layer.
        for module, own in self._own.items():
            found = module.__dict__.setdefault("forward", own)
            if found is not own and self._replaces_users:
                users[module], module.__dict__["forward"] = found, own
        try:
            with in_pass():
                yield
        finally:
            for module, own in self._own.items():
                if module.__dict__.get("forward") is own:  # else it was set meanwhile
                    del module.__dict__["forward"]
            for module, forward in users.items():
                module.__dict__.setdefault("forward", forward)


@contextmanager
def attending(config: Any, name: str) -> Iterator[None]:
    """Within the block the model of this config attends with a registered function in passes of this thread; with
    its own if there is no name.
    """
    if not name:
        yield
        return
    stock = config._attn_implementation
    config._attn_implementation = name
    try:
        with in_pass():
            yield
    finally:
        if config._attn_implementation == name:  # else the user has set another one meanwhile
            config._attn_implementation = stock
