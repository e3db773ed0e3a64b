"""The guesses of `--tree-version auto` in C++, where there is a compiler (`auto_tree.cpp`)."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from ...budget.measure import MAX_MEASURED_NODES
from ...engine.budget import DraftBudget
from ...engine.tree import DraftTree
from ...engine.verification import Acceptance
from ..growth.best_first import CENTRES, MEMORY, MINUS_EDGES
from ..growth.native import (
    GROW_ARGUMENTS,
    NUMBER,
    POINTER,
    Functions,
    NativeGrowth,
    address,
    fastest,
    flat,
    loaded,
)
from .auto_tree import RowGuesses

SOURCE = Path(__file__).with_name("auto_tree.cpp")


class _Shared(ctypes.Structure):
    """As `Shared` in `auto_tree.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("vocab_size", "k", "num_buckets", "num_kinds")),
        ("is_average", ctypes.c_int64),
        ("most_observations", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("minus_edges", "centres")),
        *((name, ctypes.c_void_p) for name in ("matrix", "codes", "rates")),
    )


@cache
def row_guesses_class() -> type[RowGuesses]:
    """Return the fastest guesses that can be had here."""
    return fastest(_library, NativeRowGuesses, RowGuesses, "Token Recycling")


@cache
def _library() -> ctypes.CDLL:
    what = "the guesses of Token Recycling (once, about 2 s)"
    functions: Functions = {
        "rows_new": (POINTER, (POINTER,)),
        "rows_free": (None, (POINTER,)),
        "rows_start": (None, (POINTER, POINTER, NUMBER)),
        "rows_append": (None, (POINTER, POINTER, NUMBER)),
        "rows_grow": (NUMBER, GROW_ARGUMENTS),
        "rows_teach": (None, (POINTER, POINTER, POINTER, NUMBER)),
        "rows_write": (None, (POINTER, POINTER, POINTER, NUMBER, POINTER, POINTER, NUMBER)),
    }
    return loaded(SOURCE, what, functions)


class NativeRowGuesses(RowGuesses):
    """Guesses whose trees are grown by C++; it reads and writes the arrays of this one."""

    def __init__(self, matrix: np.ndarray, is_average: bool) -> None:
        super().__init__(matrix, is_average)
        self._library = library = _library()
        # Kept here, since C++ reads and writes them.
        constants = (np.array(MINUS_EDGES), np.array(CENTRES))
        self._arrays = (*constants, matrix, self._codes, self._rates.array)
        sizes = (*matrix.shape, len(CENTRES), len(self._rates.rates))
        shared = _Shared(
            *sizes, is_average, MEMORY, *(values.ctypes.data for values in self._arrays)
        )
        self._rows = library.rows_new(ctypes.byref(shared))
        weakref.finalize(self, library.rows_free, self._rows)
        self._native = NativeGrowth(library.rows_grow, self._rows)
        self._is_grown = False

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a text."""
        self._is_grown = False
        tokens = array("i", prompt_ids)
        self._library.rows_start(self._rows, address(tokens), len(tokens))

    def append(self, tokens: Sequence[int]) -> None:
        """Take over new tokens of the text, of whose successors nothing is known."""
        new = array("i", tokens)
        self._library.rows_append(self._rows, address(new), len(new))

    def grow(self, root: int, budget: DraftBudget, device: torch.device) -> DraftTree:
        """Return the tree of the most probable nodes that are worth their price."""
        self._check(root)
        self._is_grown = True
        return self._native.grow(root, MAX_MEASURED_NODES - 1, budget, device)

    def learn(self, acceptance: Acceptance, order: Sequence[int]) -> None:
        """Learn from a verified tree; as `RowGuesses.learn`."""
        if self._is_grown:
            path, tokens = array("q", acceptance.path), array("i", acceptance.tokens)
            count = min(len(path), len(tokens))
            self._library.rows_teach(self._rows, address(path), address(tokens), count)
        self._is_grown = False
        self.append(acceptance.tokens)
        self._write_nodes(acceptance.node_tokens, array("q", order), *acceptance.candidates)

    def write(
        self,
        tokens: Sequence[int],
        successors: Sequence[Sequence[int]],
        logits: Sequence[Sequence[float]],
    ) -> None:
        """Write rows of tokens, one after the other: k successors each, and what their logits say."""
        self._write_nodes(tokens, array("q", range(len(tokens))), successors, logits)

    def _write_nodes(
        self,
        tokens: Sequence[int],
        order: array[int],
        successors: Sequence[Sequence[int]],
        logits: Sequence[Sequence[float]],
    ) -> None:
        self._check(*(tokens[node] for node in order))
        written, rows, values = array("i", tokens), flat("i", successors), flat("d", logits)
        self._library.rows_write(
            *(self._rows, address(written), address(order), len(order)),
            *(address(rows), address(values), len(successors[0]) if order else 0),
        )

    def _check(self, *tokens: int) -> None:
        """Raise IndexError, as Python does, if a token has no row."""
        num_rows = len(self._matrix)
        if not all(0 <= token < num_rows for token in tokens):
            raise IndexError(f"rows: got token {max(tokens)}; allowed: 0 to {num_rows - 1}")
