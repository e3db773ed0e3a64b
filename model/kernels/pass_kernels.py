"""Functions that a model's passes use in place of its own, and when they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class PassKernels:
    """Functions that a model's passes use in place of its own.

    Args:
        name: name of these functions.
        is_plain: whether plain decoding counts as computing with them too, so that near-ties need no
            other functions: in half precision.
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
