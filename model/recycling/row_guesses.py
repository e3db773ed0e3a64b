"""How probable the successors in the adjacency matrix are: what `--tree-version auto` knows.

Beside every successor stands the coded probability that the model gave it when its row was written.
How often a successor of such a rank and code came true is learned while decoding.

Shapes: V vocabulary, k successors kept for a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from model.best_first import CENTRES, AcceptanceRates, Growth, Guess, probability_codes
from model.draft_tree import DraftBudget, DraftTree
from model.verification import Acceptance

# A stored probability is of another context with the same last token: it promises about half.
TRUST = 0.5


class RowGuesses:
    """Coded probabilities beside the matrix, and what they turned out to be worth.

    This is Python's; where there is a C++ compiler the same is done by `row_guesses.cpp` (see
    `model.recycling.native_row_guesses`).

    Args:
        matrix: the adjacency matrix, int32 [V, k], which is written here too.
    """

    def __init__(self, matrix: np.ndarray) -> None:
        self._matrix = matrix
        self._codes = np.zeros(matrix.shape, dtype=np.uint8)  # 0: no row yet
        k = matrix.shape[1]
        self._rates = AcceptanceRates([TRUST * centre for _ in range(k) for centre in CENTRES])
        # kind of a guess: its rank's first kind, plus its code - 1
        self._first_kinds = [rank * len(CENTRES) - 1 for rank in range(k)]
        # What was grown for the step under way; None where another drafter's tree is verified.
        self._growth: Growth[int] | None = None

    def grow(self, root: int, budget: DraftBudget, device: torch.device) -> DraftTree:
        """Return the tree of the most probable nodes that are worth their price."""
        assert budget.prices is not None
        self._growth = growth = Growth(
            root, root, self._at, lambda _, token: token, budget.max_depth, budget.chain_only
        )
        return growth.tree(budget.prices.worth(growth), device)

    def learn(self, acceptance: Acceptance, order: Sequence[int]) -> None:
        """Learn what the guesses of the last tree were worth, and write the rows of its nodes in this order."""
        if self._growth:
            self._growth.teach(self._rates, acceptance)
            self._growth = None
        (token_ids, logits), k = acceptance.candidates, self._matrix.shape[1]
        for node in order:
            self._write(acceptance.node_tokens[node], token_ids[node][:k], logits[node][:k])

    def write(
        self,
        tokens: Sequence[int],
        successors: Sequence[Sequence[int]],
        logits: Sequence[Sequence[float]],
    ) -> None:
        """Write rows of tokens, one after the other: k successors each, and what their logits say."""
        for row in zip(tokens, successors, logits, strict=True):
            self._write(*row)

    def _write(self, token: int, successors: Sequence[int], logits: Sequence[float]) -> None:
        self._matrix[token] = successors
        self._codes[token] = probability_codes(logits)

    def _at(self, token: int) -> list[Guess]:
        """Return the guesses in a token's row of the matrix, the most probable first."""
        codes = self._codes[token].tolist()
        if not codes[0]:
            return []
        rates, row = self._rates.rates, self._matrix[token].tolist()
        guesses = [
            (rates[first + code], successor, first + code)
            for first, code, successor in zip(self._first_kinds, codes, row, strict=True)
        ]
        guesses.sort(reverse=True)
        return guesses

    def reset(self) -> None:
        """Forget everything."""
        self._codes.fill(0)
        self._rates.reset()

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the codes, uint8 [V, k], and the learned rates, float64 [2, kinds]."""
        return {"codes": torch.from_numpy(self._codes), "rates": self._rates.state()}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned.

        Raises:
            ValueError: if shapes, types or values do not fit.
        """
        codes = tensors["codes"]
        if tuple(codes.shape) != self._codes.shape or codes.dtype != torch.uint8:
            raise ValueError(
                f"matrix: got codes {codes.dtype} of shape {list(codes.shape)}; allowed: uint8 of "
                f"shape {list(self._codes.shape)}"
            )
        if codes.numel() and int(codes.max()) > len(CENTRES):
            raise ValueError(f"matrix: holds a code above {len(CENTRES)}")
        self._rates.load_state(tensors["rates"])
        self._codes[:] = codes.cpu().numpy()
