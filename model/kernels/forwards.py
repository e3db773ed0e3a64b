"""Replaces functions of a model within a block; the model is unchanged outside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


class PassKernels:
    """Functions that a model's passes use in place of its own.

    Args:
        name: name of these functions.
        is_plain: whether plain decoding counts as computing with them too, so that near-ties need no
            other functions: in compiled passes and in half precision.
    """

    def __init__(self, name: str, is_plain: bool) -> None:
        self.name = name
        self._is_plain = is_plain
        self._is_off = False

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block passes compute as plain decoding does, bit for bit."""
        self._is_off = not self._is_plain
        try:
            yield
        finally:
            self._is_off = False


@contextmanager
def exchanged_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within the block these modules compute with these functions."""
    # Bypasses `nn.Module.__setattr__`, which takes longer than a small layer.
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]
