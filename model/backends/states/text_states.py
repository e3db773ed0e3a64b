"""The states of one text in all its layers: read on, marked, and taken up again.

A state cannot forget rows. After a draft tree it becomes the state after the last accepted node, and
an earlier state is there only where `mark` has copied it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...engine.levels import LevelTree
from .layers import State, StateLayer, copied
from .mixers import Branches, Mixers


class TextStates:
    """The states of a text; empty for attention alone.

    Args:
        layers: of the cache; those that keep states are `StateLayer`s.
        first: states before any token, by layer; None: as the layers are.

    Attributes:
        layers: those with states, by their index.
        num_read: rows that were read, which the layers themselves do not count.
        is_branching: whether a pass over a draft tree is under way.
    """

    def __init__(self, layers: Sequence[object], first: Mapping[int, State] | None = None) -> None:
        self.layers = {
            index: layer for index, layer in enumerate(layers) if isinstance(layer, StateLayer)
        }
        self.num_read = 0
        self.is_branching = False
        self._is_reading = False  # whether a pass is under way, or was broken off
        self._branches: Branches | None = None  # of the last pass, if it was a tree
        if first is not None:
            self._set(first)
        # States that can be taken up again, by the number of rows that they follow.
        self._marked = {0: self.copy()}

    def __bool__(self) -> bool:
        return bool(self.layers)

    @contextmanager
    def reading(self, num_rows: int) -> Iterator[None]:
        """Run a pass over this many rows in the block; if it is broken off, only marked states are whole."""
        self._is_reading = True
        yield
        self._is_reading = False
        self.num_read += num_rows

    @contextmanager
    def branching(
        self, tree: LevelTree, mixers: Mixers, layers: Sequence[Any], base: int
    ) -> Iterator[None]:
        """Within the block mixers read a pass after `base` rows as this tree; `keep` must follow."""
        self.is_branching = True
        with mixers.over(tree, layers, base) as branches:
            yield
        self.is_branching = False
        self._branches = branches

    def keep(self, base: int, rows: Sequence[int], length: int) -> None:
        """Take up the states after the kept rows, of `length` in use; arguments as of `TreeCache.keep`.

        Raises:
            ValueError: if states would have to go back to where `mark` was not called.
        """
        if not self.layers:
            return
        if self._branches is not None and rows:
            for index, layer in self.layers.items():
                layer.set_state(self._branches.after[index](rows[-1]))
            return
        kept = base + len(rows)
        # After a tree, states are still those before it.
        num_whole = length if self._branches is None else self._branches.base
        if kept == num_whole and not self._is_reading:
            return
        if kept not in self._marked:
            raise ValueError(
                f"rows: got {kept} of {length}; allowed: {', '.join(map(str, self._marked))}, "
                "since states cannot go back to others"
            )
        self._set(self._marked[kept])
        self._is_reading = False
        self._marked = {known: states for known, states in self._marked.items() if known <= kept}

    def set_length(self, length: int) -> None:
        """State how many rows were read; the states stay as they are."""
        self.num_read = length
        self._branches = None

    def mark(self, length: int) -> None:
        """Keep the present states, those after these rows, to go back to; only the last mark counts."""
        if self.layers and length not in self._marked:
            self._marked = {0: self._marked[0], length: self.copy()}

    def nearest(self, wanted: int, length: int) -> int:
        """Return the most rows, up to `wanted` of `length`, that `keep` can go back to without a draft tree."""
        if not self.layers:
            return wanted
        known = [*self._marked] if self._is_reading else [*self._marked, length]
        return max(number for number in known if number <= wanted)

    def take_from(self, other: TextStates, wanted: int, length: int) -> None:
        """Go on from another text's states after `wanted` rows, of the `length` that it has in use."""
        if self.layers:
            self._set(other.copy() if wanted == length else other._marked[wanted])

    def copy(self) -> dict[int, State]:
        """Return a copy of the present states, by layer."""
        return {index: copied(layer.state()) for index, layer in self.layers.items()}

    def _set(self, states: Mapping[int, State]) -> None:
        for index, layer in self.layers.items():
            layer.set_state(copied(states[index]))
