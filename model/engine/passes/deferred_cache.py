"""A cache whose moves of rows wait for the next pass, which makes them on the device with all else."""

from __future__ import annotations

from collections.abc import Sequence

from ..cache import TreeCache
from .inputs import MOST_MOVED
from .static_cache import StaticStorage, StaticTreeCache


class DeferredCache(StaticTreeCache):
    """A static cache whose moves of rows wait for the next pass, which makes them on the device."""

    is_lasting = True  # a text that goes on finds its rows; other texts get other rows

    def __init__(self, storage: StaticStorage, capacity: int) -> None:
        super().__init__(storage, capacity)
        self._moves: list[tuple[int, int]] = []

    def keep(self, base: int, rows: Sequence[int]) -> None:
        self.flush()
        super().keep(base, rows)

    def copy_rows(self, other: TreeCache, length: int) -> None:
        assert isinstance(other, DeferredCache)
        other.flush()
        super().copy_rows(other, length)

    def take_moves(self, most: int = MOST_MOVED) -> list[tuple[int, int]]:
        """Return the waiting moves, (source, target), which the caller makes now; none, once they are made, if
        there are more than `most`.
        """
        if len(self._moves) > most:
            self.flush()
        moves, self._moves = self._moves, []
        return moves

    def flush(self) -> None:
        """Make the waiting moves."""
        if moves := self.take_moves():
            sources, targets = zip(*moves, strict=True)
            StaticTreeCache._move(self, sources, targets[0])

    def _move(self, rows: Sequence[int], start: int) -> None:
        if len(rows) > MOST_MOVED:
            super()._move(rows, start)
        else:
            self._moves = [*zip(rows, range(start, start + len(rows)), strict=True)]
