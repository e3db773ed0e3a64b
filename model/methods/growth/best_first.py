"""Draft trees grown best first, by C++ (`best_first.h`): always the node most likely to be accepted.

A source says, for a node's context, which tokens may follow and how probable each is. A node is
accepted if its whole path is, so that its probability is the product along the path. Growing in the
order of these probabilities gives nested trees: the first n nodes are the best tree of n nodes, and
the number to keep is chosen while growing (`model.engine.budget`).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch

from ...engine.budget import MARGIN, DraftBudget
from ...engine.tree import DraftTree
from ...machine.build import BuildError, built

# Probabilities are kept as codes: 0 is no row yet, b + 1 a probability in bucket b.
EDGES = (0.9, 0.75, 0.6, 0.45, 0.3, 0.2, 0.12, 0.07, 0.04, 0.02, 0.01, 0.004)
CENTRES = (0.95, 0.82, 0.67, 0.52, 0.37, 0.25, 0.155, 0.093, 0.055, 0.03, 0.015, 0.007, 0.002)
# Of minus a probability: these rise.
MINUS_EDGES = tuple(-edge for edge in EDGES)

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
    """Return the library of a C++ file that grows trees, built if need be (`model.machine.build`).

    Raises:
        ValueError: if it cannot be built or loaded here.
    """
    try:
        library = ctypes.CDLL(str(built((source, HEADER), what, OPTIONS)))
    except (BuildError, ImportError, OSError) as error:
        raise ValueError(
            f"{what.partition(' (')[0]}: {error}; all other methods, and recycling by default, need none"
        ) from error
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Growth:
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
        their cost.

        Args:
            root: last committed token.
            num_drafted: drafted nodes, at most.
            budget: its limits; without costs all nodes are worth theirs.
            device: of the token ids.
            sources: where guesses of each kind come from; None where all have one source.
        """
        if len(self.tokens) <= num_drafted:
            zeros = bytes((1 + num_drafted) * self.tokens.itemsize)
            self.tokens, self.parents, self._kinds = (array("i", zeros) for _ in range(3))
        cost_curve = budget.cost_curve
        sizes = array("q", cost_curve.sizes if cost_curve else ())
        milliseconds = array("d", cost_curve.milliseconds if cost_curve else ())
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
