"""The table of changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.fuzz.scene import Scene, Undo

Apply = Callable[[Scene, Random], Undo | None]


@dataclass(frozen=True)
class Change:
    """A kind of change.

    Attributes:
        name: what is done.
        apply: does it; returns what undoes it, None if the model is to be put back from a snapshot.
        may_refuse: whether the model may be refused afterwards, as a pass over several tokens, or positions, or
            a dtype are not what they were.
        is_seen: whether the texts of a random Llama differ afterwards.
    """

    name: str
    apply: Apply
    may_refuse: bool = False
    is_seen: bool = True


CHANGES: dict[str, Change] = {}


def change(
    name: str, may_refuse: bool = False, is_seen: bool = True, **given: Any
) -> Callable[[Callable[..., Undo | None]], Callable[..., Undo | None]]:
    """Return a decorator that puts a function into the table, with these arguments."""

    def put(function: Callable[..., Undo | None]) -> Callable[..., Undo | None]:
        def apply(scene: Scene, random: Random) -> Undo | None:
            return function(scene, random, **given)

        assert name not in CHANGES, name
        CHANGES[name] = Change(name, apply, may_refuse, is_seen)
        return function

    return put
