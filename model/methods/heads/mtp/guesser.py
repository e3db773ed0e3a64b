"""Guesses of the MTP layers that the model's own checkpoint ships, for another drafter.

Shapes: C prompt tokens in a chunk, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ....engine.budget import DraftBudget
from ....engine.drafter import Drafter, Needs, VerifiedStep
from ....engine.passes.hidden import FINAL
from ....engine.target import TargetModel
from ....machine.transfer import uploaded
from ...growth.guesses import Guesser, Guesses
from .layers import MtpText, check_mtp

if TYPE_CHECKING:  # Python 3.10 has none
    from typing import Self

# Guesses in a row, and likely tokens after each.
DEPTH, WIDTH = 6, 10


class MtpGuesser(Guesser):
    """Guesses a chain of likeliest tokens, and the likely tokens after each."""

    needs = Needs(hidden_layers=(FINAL,))

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(None, vocab_size, device)
        self._target: TargetModel | None = None
        self._text: MtpText | None = None  # until the model is known
        self._prompt_ids: Sequence[int] = ()
        self._num_read = 0

    def sibling(self) -> Self:
        """Return a guesser whose text has rows of its own; the layers are shared."""
        sibling = super().sibling()
        sibling._text = self._text.sibling() if self._text else None
        return sibling

    def check_config(self, config: Any) -> None:
        super().check_config(config)
        check_mtp(config)

    def check_target(self, target: TargetModel) -> None:
        """Check the model, and load its MTP layers, once."""
        super().check_target(target)
        self.for_target(target)

    def for_target(self, target: TargetModel) -> Drafter:
        """Load the model's MTP layers, once; return this guesser."""
        if target is not self._target:
            self.check_config(target.config)
            self._text, self._target = MtpText(target), target
        return self

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids, self._num_read = prompt_ids, 0
        if self._text is not None:
            self._text.clear()

    @torch.inference_mode()
    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Read a chunk of the prompt: C hidden states, each with the token after it."""
        assert self._text is not None
        begin, end = self._num_read, self._num_read + len(token_ids)
        self._text.read(self._prompt_ids[begin + 1 : end + 1], hidden)
        self._num_read = end

    @torch.inference_mode()
    def guesses(self, context: Sequence[int], budget: DraftBudget) -> Guesses | None:
        if self._text is None or not budget.max_depth:
            return None
        found = self._text.guesses(min(DEPTH, budget.max_depth), WIDTH)
        if found is None:  # such as after a prompt of one token: no hidden states come before it
            return None
        numbers, values = torch.stack(
            [part.double() for part in found]
        ).tolist()  # one copy to the host
        rows = [[int(token) for token in row] for row in numbers]
        chain = [context[-1], *(row[0] for row in rows[:-1])]
        return Guesses(chain, range(-1, len(chain) - 1), rows, values)

    @torch.inference_mode()
    def observe(self, step: VerifiedStep) -> None:
        """Read the accepted tokens, from the model's hidden states."""
        if step.stop_reason is None:
            assert self._text is not None and step.hidden is not None
            path = uploaded(step.acceptance.path, step.hidden.device)
            self._text.read(step.acceptance.tokens, step.hidden[path])

    def describe(self) -> str:
        if self._text is None:
            return "the model's MTP layers"
        return f"{self._text.num_layers} MTP layers of {self._text.num_parameters / 1e6:.1f}M parameters"
