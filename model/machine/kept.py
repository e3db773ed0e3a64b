"""A value that is made when it is first asked for, and kept by all that share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """The value that was made last; weights of a model, say, of which two do not fit into memory."""

    def __init__(self) -> None:
        self._kept: tuple[object, Value] | None = None

    def get(self, key: object, make: Callable[[], Value]) -> Value:
        """Return the value of a key, such as a dtype: the kept one, or a new one in its place."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # freed before the next one is made, where nobody else holds it
            self._kept = key, make()
        return self._kept[1]
