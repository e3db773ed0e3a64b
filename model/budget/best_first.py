"""Draft trees grown best first, by C++ (`best_first.h`): always the node most likely to be accepted.

For a node's context, a source gives the possible next tokens with their probabilities. A node is
accepted if its whole path is, so its probability is the product along the path. Growing in falling
order of these probabilities gives nested trees: the first n nodes are the best tree of n nodes, and
the number to keep is chosen while growing (`model.engine.budget`).

Functions and structs are declared once, in C++, and read from its text, so that Python cannot disagree about an
order or a type.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain
from operator import neg
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ..engine.budget import MARGIN, DraftBudget
from ..engine.drafter import Drafter
from ..engine.tree import DraftTree
from ..machine.files import BuildError, built

if TYPE_CHECKING:  # Python 3.10 has none
    from typing import Self

ANY_TOKEN = -1  # of a node: whatever its token is
# Probabilities are stored as codes: 0 for no row yet, b + 1 for a probability in bucket b.
EDGES = (0.9, 0.75, 0.6, 0.45, 0.3, 0.2, 0.12, 0.07, 0.04, 0.02, 0.01, 0.004)
CENTRES = (0.95, 0.82, 0.67, 0.52, 0.37, 0.25, 0.155, 0.093, 0.055, 0.03, 0.015, 0.007, 0.002)
# Edges of negated probabilities, which rise.
MINUS_EDGES = tuple(map(neg, EDGES))

HEADER = Path(__file__).with_name("best_first.h")
# No fused multiply-add, so that numbers equal Python's.
OPTIONS = ("-ffp-contract=off",)
NUMBERS: dict[str, Any] = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "double": ctypes.c_double,
}
ELEMENTS = {
    "int64_t": np.int64,
    "int32_t": np.int32,
    "int8_t": np.int8,
    "uint8_t": np.uint8,
    "double": np.float64,
}
STRUCT = re.compile(r"^struct Shared \{$(.*?)^\};$", re.MULTILINE | re.DOTALL)
MEMBERS = re.compile(r"(?:const )?(\w+\*?) ([\w, ]+);")
FUNCTION = re.compile(r"^(\w+\*?) (\w+)\(([^)]*)\) \{", re.MULTILINE)


class Guesses(NamedTuple):
    """The likeliest tokens after the sequence, and after the nodes of a tree; the root, its last token, comes
    first.
    """

    tokens: Sequence[int]  # of the nodes [M], or `ANY_TOKEN`
    parents: Sequence[int]  # of the nodes [M]; -1 for the root
    rows: Sequence[Sequence[int]]  # likely tokens after each node, [M, k]
    log_probabilities: Sequence[Sequence[float]]  # of these tokens, [M, k]


def chain_of(root: int, tokens: Sequence[int]) -> Guesses:
    """Return guesses that these tokens follow the root, one after the other."""
    nodes, size = [root, *tokens[:-1]], len(tokens)
    return Guesses(nodes, range(-1, size - 1), [[one] for one in tokens], [[0.0]] * size)


class Guesser(Drafter):
    """A drafter whose guesses another one can take; this base has none."""

    # Whether a prompt's states may wait until it guesses, which it may never be asked to.
    reads_late = False

    def guesses(self, context: Sequence[int], budget: DraftBudget) -> Guesses | None:
        """Return what it would draft from, in the place of `propose`; None if it knows nothing of the sequence
        yet.
        """
        return None

    def prepare_guesses(self, num_tokens: int) -> None:
        """Prepare guesses after sequences of up to `num_tokens` tokens: no later one captures a graph."""


def tree_library(source: Path, what: str) -> Path:
    """Return the file of a library that grows trees, built if needed; `what` and errors as of `built`."""
    headers = (HEADER, *sorted(source.parent.glob("*.h")))
    return built((source, *headers), what, OPTIONS)


def loaded(source: Path, what: str) -> ctypes.CDLL:
    """Return the library of a C++ file that grows trees, built if needed, or raise ValueError."""
    try:
        library = ctypes.CDLL(str(tree_library(source, what)))
    except (BuildError, ImportError, OSError) as error:
        raise ValueError(
            f"{what.partition(' (')[0]}: {error}; or use pld, or recycling with tree_version "
            "2.2.2, which need no compiler"
        ) from error
    declare_functions(library, source.read_text())
    return library


def declare_functions(library: ctypes.CDLL, source: str) -> None:
    """Give the functions of a library the types that the `extern "C"` block of its source declares."""
    for result, name, arguments in FUNCTION.findall(source.partition('extern "C" {')[2]):
        function = getattr(library, name)
        function.restype = None if result == "void" else _type(result)
        declared = (argument.split()[-2] for argument in arguments.split(","))
        function.argtypes = [_type(kind) for kind in declared]


def shared_struct(source: str, values: Mapping[str, float | np.ndarray]) -> ctypes.Structure:
    """Return the struct `Shared` that a C++ source declares, with these numbers and the addresses of these arrays.

    The caller keeps the arrays alive.

    Raises:
        TypeError: if the names or the dtypes of arrays are not the declared ones.
    """
    members = {
        name: kind
        for kind, names in MEMBERS.findall(re.sub(r"//.*", "", STRUCT.findall(source)[0]))
        for name in names.split(", ")
    }
    if members.keys() != values.keys():
        different = ", ".join(sorted(members.keys() ^ values.keys()))
        raise TypeError(f"struct Shared: {different} in Python or in C++ alone; allowed: in both")
    fields = [(name, _type(kind)) for name, kind in members.items()]
    shared: ctypes.Structure = type("Shared", (ctypes.Structure,), {"_fields_": fields})()
    for name, kind in members.items():
        value = values[name]
        if isinstance(value, np.ndarray):
            if not kind.endswith("*") or value.dtype != ELEMENTS[kind[:-1]]:
                raise TypeError(
                    f"struct Shared, {name}: got an array of {value.dtype}; allowed: {kind}"
                )
            value = value.ctypes.data
        setattr(shared, name, value)
    return shared


def _type(kind: str) -> Any:
    return ctypes.c_void_p if kind.endswith("*") else NUMBERS[kind]


class Growth:
    """A source of guesses in C++, which keeps a sequence and grows trees; base of the sources.

    `tokens` and `parents` are those of the last tree's nodes; later entries are meaningless.

    Args:
        library: of the functions.
        name: that their names begin with: "pool" for `pool_new`, `pool_free`, `pool_start` and so on.
        declared: the C++ text that declares the struct of the source.
        shared: its numbers and arrays, by name.
    """

    # The source of each kind of guess, if there are several.
    sources: ClassVar[Sequence[str] | None] = None

    def __init__(
        self,
        library: ctypes.CDLL,
        name: str,
        declared: str,
        shared: Mapping[str, float | np.ndarray],
    ) -> None:
        self._library, self._name = library, name
        self._shared = shared  # kept alive here, since C++ uses the arrays
        self._struct = shared_struct(declared, shared)
        self._open()

    def sibling(self) -> Self:
        """Return a source of the same arrays for another sequence."""
        sibling = copy(self)
        sibling._open()
        return sibling

    def _open(self) -> None:
        verbs = ("new", "free", "start", "append", "grow", "offer", "take")
        new, free, self._start, self._append, self._grow, self._offer, self._take = (
            getattr(self._library, f"{self._name}_{verb}") for verb in verbs
        )
        self._source = new(ctypes.byref(self._struct))
        weakref.finalize(self, free, self._source)
        self._num_offered = 0
        self.tokens, self.parents, self._kinds = (array("i") for _ in range(3))

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a sequence."""
        tokens = array("i", prompt_ids)
        self._start(self._source, address(tokens), len(tokens))

    def append(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the sequence, of which nothing else is known."""
        new = array("i", tokens)
        self._append(self._source, address(new), len(new))

    def grow(self, root: int, num_drafted: int, budget: DraftBudget) -> DraftTree:
        """Return the tree of the most probable nodes: as many as are worth their cost, at most `num_drafted`.

        Without a cost curve it grows to `num_drafted`.
        """
        self._make_room(num_drafted)
        self._num_offered = 0
        cost_curve = budget.cost_curve
        sizes = array("q", cost_curve.sizes if cost_curve else ())
        milliseconds = array("d", cost_curve.milliseconds if cost_curve else ())
        count = self._grow(
            *(self._source, root, num_drafted, budget.max_depth, budget.chain_only),
            *(len(sizes), address(sizes), address(milliseconds), MARGIN),
            *map(address, (self.tokens, self.parents, self._kinds)),
        )
        return self._tree(count)

    def offer(
        self, root: int, num_drafted: int, budget: DraftBudget, least: float = 0.0
    ) -> array[float]:
        """Grow the tree of the most probable nodes, at most `num_drafted`, whatever they cost.

        Returns:
            The probability of each drafted node that it is accepted, in falling order, none below `least`.
        """
        gains = array("d", bytes(num_drafted * 8))
        self._num_offered = self._offer(
            *(self._source, root, num_drafted, budget.max_depth, budget.chain_only),
            *(least, address(gains)),
        )
        return gains[: self._num_offered]

    def take(self, num_drafted: int) -> DraftTree:
        """Return the tree of the first nodes of the last offer; ValueError if fewer were offered."""
        if not 0 <= num_drafted <= self._num_offered:
            raise ValueError(
                f"take: got {num_drafted} nodes; allowed: 0 to {self._num_offered}, those of the last offer"
            )
        self._make_room(num_drafted)
        self._take(
            *(self._source, 1 + num_drafted),
            *map(address, (self.tokens, self.parents, self._kinds)),
        )
        return self._tree(1 + num_drafted)

    def _make_room(self, num_drafted: int) -> None:
        if len(self.tokens) <= num_drafted:
            zeros = bytes((1 + num_drafted) * self.tokens.itemsize)
            self.tokens, self.parents, self._kinds = (array("i", zeros) for _ in range(3))

    def _tree(self, count: int) -> DraftTree:
        parents, sources = tuple(self.parents[:count]), self.sources
        names = tuple([sources[kind] for kind in self._kinds[:count]]) if sources else None
        return DraftTree.from_lists(self.tokens[:count].tolist(), parents, names)


def flat(kind: str, rows: Sequence[Sequence[float]]) -> array[float]:
    """Return the numbers of all rows in one array."""
    return array(kind, chain.from_iterable(rows))


def address(values: array[int] | array[float]) -> int:
    """Return the address of the numbers, for C++."""
    return values.buffer_info()[0]
