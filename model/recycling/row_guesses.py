"""How probable the successors in the adjacency matrix are: what `--tree-version auto` knows.

Beside every successor stands the coded probability that the model gave it when its row was written.
How often a successor of such a rank and code came true is learned while decoding.

Shapes: V vocabulary, k successors kept for a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from model.best_first import CENTRES, AcceptanceRates, Guess, probability_codes

# A stored probability is of another context with the same last token: it promises about half.
TRUST = 0.5


class RowGuesses:
    """Coded probabilities beside the matrix, and what they turned out to be worth.

    Args:
        vocab_size: rows V.
        k: successors kept for a token.
    """

    def __init__(self, vocab_size: int, k: int) -> None:
        self._codes = np.zeros((vocab_size, k), dtype=np.uint8)  # 0: no row yet
        self.rates = AcceptanceRates([TRUST * centre for _ in range(k) for centre in CENTRES])
        # kind of a guess: its rank's first kind, plus its code - 1
        self._first_kinds = [rank * len(CENTRES) - 1 for rank in range(k)]

    def at(self, token: int, row: np.ndarray) -> list[Guess]:
        """Return the guesses in a token's row [k] of the matrix, the most probable first."""
        codes = self._codes[token].tolist()
        if not codes[0]:
            return []
        rates = self.rates.rates
        guesses = [
            (rates[first + code], successor, first + code)
            for first, code, successor in zip(self._first_kinds, codes, row.tolist(), strict=True)
        ]
        guesses.sort(reverse=True)
        return guesses

    def write(self, token: int, logits: Sequence[float]) -> None:
        """Write the codes of a token's row from its k logits."""
        self._codes[token] = probability_codes(logits)

    def reset(self) -> None:
        """Forget everything."""
        self._codes.fill(0)
        self.rates.reset()

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the codes, uint8 [V, k], and the learned rates, float64 [2, kinds]."""
        return {"codes": torch.from_numpy(self._codes), "rates": self.rates.state()}

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
        self.rates.load_state(tensors["rates"])
        self._codes[:] = codes.cpu().numpy()
