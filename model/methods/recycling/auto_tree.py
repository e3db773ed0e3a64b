"""Probabilities of the successors in the adjacency matrix, for `--tree-version auto`.

Every successor is stored with a coded probability. The model gives it for one context; a row can
average over the contexts of its token. How often successors of a rank and code are accepted is
learned while decoding, separately for successors that the text has already named.

Shapes: V vocabulary, k successors kept for a token.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from ...budget.acceptance import MEMORY, AcceptanceRates
from ...budget.best_first import CENTRES, MINUS_EDGES, Growth, address, flat, loaded
from ...budget.measure import MAX_MEASURED_NODES
from ...budget.memory import check_tensor
from ...engine.budget import DraftBudget
from ...engine.tree import DraftTree
from ...engine.verification import Acceptance

# A stored probability comes from another context with the same last token, so about half of it is expected.
TRUST = 0.5
# Levels of a successor: not in the text, only in the prompt, in the answer, or seen right after this token.
NUM_LEVELS = 4
SOURCE = Path(__file__).with_name("auto_tree.cpp")


@cache
def library_of_guesses() -> ctypes.CDLL:
    return loaded(SOURCE, "the guesses of Token Recycling (once, about 2 s)")


class AutoTree(Growth):
    """Coded probabilities beside the matrix, int32 [V, k], which is written here too; how often they hold."""

    def __init__(self, matrix: np.ndarray, is_average: bool) -> None:
        self._matrix = matrix
        self._codes = np.zeros(matrix.shape, dtype=np.uint8)  # 0: no row yet
        k = matrix.shape[1]
        priors = [TRUST * centre for _ in range(k) for centre in CENTRES for _ in range(NUM_LEVELS)]
        self._rates = AcceptanceRates(priors)
        shared = {
            "vocab_size": len(matrix),
            "k": k,
            "num_buckets": len(CENTRES),
            "num_kinds": len(self._rates.rates),
            "is_average": is_average,
            "most_observations": MEMORY,
            "minus_edges": np.array(MINUS_EDGES),
            "centres": np.array(CENTRES),
            "matrix": matrix,
            "codes": self._codes,
            "rates": self._rates.array,
        }
        super().__init__(library_of_guesses(), "rows", SOURCE.read_text(), shared)

    def _open(self) -> None:
        super()._open()
        self._is_grown = False

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a text; forget an unverified tree of the last one."""
        self._is_grown = False
        super().start(prompt_ids)

    def grow(self, root: int, num_drafted: int, budget: DraftBudget) -> DraftTree:
        self._check(root)
        self._is_grown = True
        return super().grow(root, min(num_drafted, MAX_MEASURED_NODES - 1), budget)

    def offer(
        self, root: int, num_drafted: int, budget: DraftBudget, least: float = 0.0
    ) -> array[float]:
        """Return the probabilities of the most probable nodes, as `Growth.offer`; none if the root has no row."""
        num_drafted = min(num_drafted, MAX_MEASURED_NODES - 1) if root < len(self._matrix) else 0
        self._is_grown = True
        return super().offer(root, num_drafted, budget, least)

    def learn(self, acceptance: Acceptance, order: Sequence[int]) -> None:
        """Learn acceptance from the last tree, append the new tokens, and write the rows of nodes in this order."""
        if self._is_grown:
            path, tokens = array("q", acceptance.path), array("i", acceptance.tokens)
            count = min(len(path), len(tokens))
            self._library.rows_teach(self._source, address(path), address(tokens), count)
        self._is_grown = False
        self.append(acceptance.tokens)
        self.write(acceptance.node_tokens, *acceptance.candidates, order)

    def write(
        self,
        tokens: Sequence[int],
        successors: Sequence[Sequence[int]],
        logits: Sequence[Sequence[float]],
        order: Sequence[int] | None = None,
    ) -> None:
        """Write rows, one by one or in this order: k successors a token, and codes of their probabilities."""
        nodes = array("q", range(len(tokens)) if order is None else order)
        self._check(*(tokens[node] for node in nodes))
        written, rows, values = array("i", tokens), flat("i", successors), flat("d", logits)
        self._library.rows_write(
            *(self._source, address(written), address(nodes), len(nodes)),
            *(address(rows), address(values), len(successors[0]) if nodes else 0),
        )

    def _check(self, *tokens: int) -> None:
        """Raise IndexError, as Python does, if a token has no row."""
        num_rows = len(self._matrix)
        if not all(0 <= token < num_rows for token in tokens):
            raise IndexError(f"rows: got token {max(tokens)}; allowed: 0 to {num_rows - 1}")

    def reset(self) -> None:
        self._codes.fill(0)
        self._rates.reset()

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the codes, uint8 [V, k], and the learned rates, float64 [2, kinds]."""
        return {"codes": torch.from_numpy(self._codes.copy()), "rates": self._rates.state()}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a `memory`, or raise ValueError if it does not fit."""
        codes = tensors["codes"]
        check_tensor("matrix: got codes", codes, self._codes.dtype, self._codes.shape)
        if codes.numel() and int(codes.max()) > len(CENTRES):
            raise ValueError(f"matrix: holds a code above {len(CENTRES)}")
        is_coded = codes > 0
        if bool((is_coded.any(dim=1) != is_coded.all(dim=1)).any()):
            raise ValueError("matrix: holds rows with codes for some successors but not all")
        self._rates.load_state(tensors["rates"])
        self._codes[:] = codes.cpu().numpy()
