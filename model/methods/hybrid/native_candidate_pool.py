"""The market of the hybrid in C++, where there is a compiler (`candidate_pool.cpp`)."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

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
from .candidate_pool import (
    FIRST_FREQUENT,
    IN_TEXT_WEIGHT,
    KIND_CENTRES,
    KIND_SOURCES,
    MATCH_WEIGHTS,
    NEIGHBOUR_WEIGHTS,
    ROW_WEIGHTS,
    Market,
)
from .frequent_tokens import NUM_TOKENS
from .neighbours import LARGEST_LOGIT, LENGTH, LOGIT_STEPS, NUM_STEPS
from .row_tables import FIRST, NUM_CODES

SOURCE = Path(__file__).with_name("candidate_pool.cpp")


class _Shared(ctypes.Structure):
    """As `Shared` in `candidate_pool.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_slots", "k", "vocab_size")),
        *((name, ctypes.c_int64) for name in ("num_buckets", "num_codes", "first_of_row")),
        *((name, ctypes.c_int64) for name in ("num_match_weights", "num_frequent")),
        *((name, ctypes.c_int64) for name in ("first_frequent", "num_kinds")),
        *((name, ctypes.c_int64) for name in ("num_records", "num_probes")),
        *((name, ctypes.c_int64) for name in ("num_compared", "num_steps", "state_length")),
        *((name, ctypes.c_double) for name in ("in_text_weight", "most_observations")),
        *((name, ctypes.c_double) for name in ("largest_logit", "logit_steps")),
        *((name, ctypes.c_void_p) for name in ("minus_edges", "row_weights", "match_weights")),
        *((name, ctypes.c_void_p) for name in ("kind_centres", "neighbour_weights")),
        *((name, ctypes.c_void_p) for name in ("keys", "rows", "rates", "counts")),
        *((name, ctypes.c_void_p) for name in ("before", "after", "record_tokens")),
        *((name, ctypes.c_void_p) for name in ("record_rows", "previous", "latest")),
        ("num_recorded", ctypes.c_void_p),
    )


@cache
def market_class() -> type[Market]:
    """Return the fastest market that can be had here."""
    return fastest(_library, NativeMarket, Market, "the hybrid")


@cache
def _library() -> ctypes.CDLL:
    what = "the market of the hybrid (once, about 2 s)"
    tree = (NUMBER, POINTER, POINTER)
    text, probes = (POINTER, POINTER, NUMBER, NUMBER), (POINTER, NUMBER, NUMBER)
    path, emitted, candidates = (POINTER, NUMBER), (POINTER, NUMBER), (POINTER, POINTER, NUMBER)
    functions: Functions = {
        "market_new": (POINTER, (POINTER,)),
        "market_free": (None, (POINTER,)),
        "market_reload": (None, (POINTER,)),
        "market_start": (None, (POINTER, POINTER, NUMBER)),
        "market_append": (None, (POINTER, POINTER, NUMBER)),
        "market_write_rows": (None, (*text, POINTER, POINTER, *probes)),
        "market_grow": (NUMBER, GROW_ARGUMENTS),
        "market_learn": (None, (POINTER, *tree, *path, *emitted, *candidates, *probes)),
    }
    return loaded(SOURCE, what, functions)


class NativeMarket(Market):
    """A market whose text, trees and bids are C++'s; it writes into the arrays of this one."""

    def __init__(self, num_slots: int, k: int, vocab_size: int, num_neighbours: int = 0) -> None:
        super().__init__(num_slots, k, vocab_size, num_neighbours)
        self._library = library = _library()
        weights = (ROW_WEIGHTS, MATCH_WEIGHTS, KIND_CENTRES, NEIGHBOUR_WEIGHTS)
        constants = [np.array(numbers) for numbers in (MINUS_EDGES, *weights)]
        learned = (self._rates.array, self._frequent.state().numpy())
        arrays = (*constants, *self.tables.arrays, *learned, *self.neighbours.arrays)
        sizes = (num_slots, k, vocab_size, len(CENTRES), NUM_CODES, FIRST)
        kinds = (len(MATCH_WEIGHTS), NUM_TOKENS, FIRST_FREQUENT, len(self._rates.rates))
        num_records, num_probes = self.neighbours.arrays[0].shape
        records = (num_records, num_probes, num_neighbours, NUM_STEPS, LENGTH)
        doubles = (IN_TEXT_WEIGHT, MEMORY, LARGEST_LOGIT, LOGIT_STEPS)
        numbers = (*sizes, *kinds, *records, *doubles)
        shared = _Shared(*numbers, *(values.ctypes.data for values in arrays))
        self._arrays = arrays  # which C++ reads and writes
        self._market = library.market_new(ctypes.byref(shared))
        weakref.finalize(self, library.market_free, self._market)
        self._native = NativeGrowth(library.market_grow, self._market)

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a text: index the prompt."""
        tokens = array("i", prompt_ids)
        self._library.market_start(self._market, address(tokens), len(tokens))

    def write_rows(
        self,
        text: Sequence[int],
        begin: int,
        token_ids: Sequence[Sequence[int]],
        logits: Sequence[Sequence[float]],
        probes: torch.Tensor | None = None,
    ) -> None:
        """Make rows of what follows each token of a text from `begin` on; as `Market.write_rows`."""
        tokens, rows = array("i", text), flat("i", token_ids)
        values = flat("d", logits)
        self._library.market_write_rows(
            *(self._market, address(tokens), begin, len(tokens), address(rows), address(values)),
            *_places(probes),
        )

    def grow(
        self, root: int, num_nodes: int, budget: DraftBudget, device: torch.device
    ) -> DraftTree:
        """Return the tree of the most probable nodes; as `Market.grow`."""
        return self._native.grow(root, num_nodes, budget, device, KIND_SOURCES)

    def learn(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn from the last tree that was grown; as `Market.learn`."""
        tokens, parents = self._native.tokens, self._native.parents
        path, emitted = array("q", acceptance.path), array("i", acceptance.tokens)
        token_ids, logits = acceptance.candidates
        rows, values = flat("i", token_ids), flat("d", logits)
        self._library.market_learn(
            *(self._market, tree.topology.num_nodes, address(tokens), address(parents)),
            *(address(path), len(path), address(emitted), len(emitted)),
            *(address(rows), address(values), len(token_ids[0])),
            *_places(acceptance.probes),
        )

    def append(self, tokens: Iterable[int]) -> None:
        """Take over new tokens of the text."""
        new = array("i", tokens)
        self._library.market_append(self._market, address(new), len(new))

    def reset(self) -> None:
        """Forget the rows, and what guesses were worth."""
        super().reset()
        self._library.market_reload(self._market)

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned; errors are those of `Market.load_memory`."""
        super().load_memory(tensors)
        self._library.market_reload(self._market)


def _places(probes: torch.Tensor | None) -> tuple[int | None, int, int]:
    """Return where probes [N, S] begin, and how far nodes and probes are apart; nowhere, of none."""
    if probes is None:
        return None, 0, 0
    return probes.data_ptr(), probes.stride(0), probes.stride(1)
