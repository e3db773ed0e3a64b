"""Trees grown by C++ (`best_first.h`), for sources of guesses that are written there."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch

from ...engine.budget import MARGIN, DraftBudget
from ...engine.tree import DraftTree
from ...machine.build import BuildError, built

Source = TypeVar("Source")

HEADER = Path(__file__).with_name("best_first.h")
# The same numbers as Python's: a product that is added is rounded first.
OPTIONS = ("-ffp-contract=off",)
POINTER, NUMBER, FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
# Of a function that grows a tree; it returns N.
GROW_ARGUMENTS = (
    *(POINTER, FLAG, NUMBER, NUMBER, FLAG),
    *(NUMBER, POINTER, POINTER, ctypes.c_double),
    *(POINTER, POINTER, POINTER),
)
# Result and arguments of functions, by name.
Functions = Mapping[str, tuple[type | None, tuple[type, ...]]]


def loaded(source: Path, what: str, functions: Functions) -> ctypes.CDLL:
    """Return the library of a C++ file that grows trees, built if need be (`model.machine.build`)."""
    library = ctypes.CDLL(str(built((source, HEADER), what, OPTIONS)))
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def fastest(
    load: Callable[[], object], native: type[Source], python: type[Source], method: str
) -> type[Source]:
    """Return the class in C++ if its library loads; if not, Python's, and standard error says why."""
    try:
        load()
    except (BuildError, ImportError, OSError) as error:
        print(f"{method} drafts in Python, which takes longer: {error}", file=sys.stderr)
        return python
    return native


class NativeGrowth:
    """The last tree that a C++ source has grown.

    Args:
        grow: a function of `GROW_ARGUMENTS`.
        source: its first argument.

    Attributes:
        tokens, parents: of the tree's nodes, then whatever was there.
    """

    def __init__(self, grow: Callable[..., int], source: int) -> None:
        self._grow = grow
        self._source = source
        self.tokens, self.parents, self._kinds = (array("i") for _ in range(3))

    def grow(
        self,
        root: int,
        num_drafted: int,
        budget: DraftBudget,
        device: torch.device,
        sources: Sequence[str] | None = None,
    ) -> DraftTree:
        """Return the tree of the most probable nodes: at most `num_drafted`, and as many as are worth
        their price.

        Args:
            root: last committed token.
            num_drafted: drafted nodes, at most.
            budget: its limits; without prices all nodes are worth theirs.
            device: of the token ids.
            sources: where guesses of each kind come from; None where all have one source.
        """
        if len(self.tokens) <= num_drafted:
            zeros = bytes((1 + num_drafted) * self.tokens.itemsize)
            self.tokens, self.parents, self._kinds = (array("i", zeros) for _ in range(3))
        prices = budget.prices
        sizes = array("q", prices.sizes if prices else ())
        milliseconds = array("d", prices.milliseconds if prices else ())
        count = self._grow(
            *(self._source, root, num_drafted, budget.max_depth, budget.chain_only),
            *(len(sizes), address(sizes), address(milliseconds), MARGIN),
            *map(address, (self.tokens, self.parents, self._kinds)),
        )
        parents = tuple(self.parents[:count])
        names = tuple([sources[kind] for kind in self._kinds[:count]]) if sources else None
        return DraftTree.from_lists(self.tokens[:count].tolist(), parents, device, names)


def flat(kind: str, rows: Sequence[Sequence[float]]) -> array[float]:
    """Return the numbers of all rows, one row after the other."""
    return array(kind, chain.from_iterable(rows))


def address(values: array[int] | array[float]) -> int:
    """Return where the numbers are, for a function of C++."""
    return values.buffer_info()[0]
