"""Guesses of the MTP layers that the model's own checkpoint ships, for another drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....engine.budget import DraftBudget
from ....engine.drafter import Needs
from ....engine.passes.hidden import FINAL
from ....engine.target import TargetModel
from ...growth.guesses import Guesses
from ..state_reader import StateReader
from .layers import MtpText, check_mtp

# Guesses in a row, and likely tokens after each.
DEPTH, WIDTH = 6, 10


class MtpGuesser(StateReader[MtpText]):
    """Guesses a chain of likeliest tokens, and the likely tokens after each."""

    needs = Needs(hidden_layers=(FINAL,))

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(None, vocab_size, device)

    def check_config(self, config: Any) -> None:
        super().check_config(config)
        check_mtp(config)

    @torch.inference_mode()
    def guesses(self, context: Sequence[int], budget: DraftBudget) -> Guesses | None:
        text = self.read_text()
        if text is None or not budget.max_depth:
            return None
        found = text.guesses(min(DEPTH, budget.max_depth), WIDTH)
        if found is None:  # such as after a prompt of one token: no hidden states come before it
            return None
        # One copy to the host.
        numbers, values = torch.stack([part.double() for part in found]).tolist()
        rows = [[int(token) for token in row] for row in numbers]
        chain = [context[-1], *(row[0] for row in rows[:-1])]
        return Guesses(chain, range(-1, len(chain) - 1), rows, values)

    def _text_of(self, target: TargetModel) -> MtpText:
        return MtpText(target)

    def describe(self) -> str:
        if self._text is None:
            return "the model's MTP layers"
        return f"{self._text.num_layers} MTP layers of {self._text.num_parameters / 1e6:.1f}M parameters"
