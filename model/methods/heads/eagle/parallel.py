"""P-EAGLE: EAGLE-3's network, with more layers, guesses several tokens in one pass.

After the text's last row come rows for tokens that nobody knows yet: each has the embedding of a mask token and a
learnt vector in place of hidden states, and sees the text and the rows before it. The i-th of them guesses the
token i + 1 places on. No guess reads another one, so they are drafted as a chain, as by the authors; as a source of
the hybrid, the likely tokens of every place become a tree.

Source: M. Hui et al., arXiv 2602.01469. Checkpoints are those of the package speculators.

Shapes: n rows, D hidden size, W hidden states side by side, g guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....backends.target import TargetModel
from ....budget.best_first import ANY_TOKEN, Guesses
from ....engine.budget import MAX_DRAFT, DraftBudget
from ....engine.tree import DraftTree
from ....machine.hardware import uploaded
from ....options import Options, option
from ..layers import Attend, HeadRows, causal_mask
from ..replayed import ReplayedRows
from .drafter import GUIDE_WIDTH, HEADS, FusingDrafter, build_network
from .network import ParallelNetwork


class ParallelText:
    """The rows of a text in every layer of a network."""

    def __init__(self, network: ParallelNetwork, target: TargetModel) -> None:
        self._network, self._target, self._device = network, target, target.device
        self._dtype, shape = network.mask_hidden.dtype, network.shape
        layers = (shape, self._dtype, shape.num_layers)
        self.fixed = ReplayedRows(target, *layers) if target.is_replayed else None
        with torch.inference_mode(False):
            # The state after the last row.
            self._last = torch.zeros(1, shape.hidden_size, dtype=self._dtype, device=self._device)
        self.clear()

    def clear(self) -> None:
        shape = self._network.shape
        self._rows = [HeadRows(shape, self._device, self._dtype) for _ in range(shape.num_layers)]
        self._read = 0
        if self.fixed is not None:
            self.fixed.num_read = 0

    @property
    def _num_read(self) -> int:
        return self._read if self.fixed is None else self.fixed.num_read

    def sibling(self) -> ParallelText:
        """Return another text, with no row yet, for the same network."""
        return ParallelText(self._network, self._target)

    def read(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Read rows: hidden states [n, W * D], and the token after each of them."""
        if self.fixed is not None:
            attends = [partial(self.fixed.attend, layer=layer) for layer in range(len(self._rows))]
            self.fixed.read(token_ids, hidden, partial(self._states, attends=attends), self._last)
        else:
            count = len(token_ids)
            positions = torch.arange(self._num_read, self._num_read + count, device=self._device)
            tokens = uploaded(token_ids, self._device)
            hidden = hidden.to(self._device, self._dtype)
            self._last = self._states(tokens, hidden, positions, self._after_text(count))[-1:]
            self._read += count

    def guesses(self, count: int, width: int) -> tuple[list[list[int]], list[list[float]]] | None:
        """Return the likeliest tokens of the next g places, with the logarithms of their probabilities.

        None if nothing was read.
        """
        if not self._num_read:
            return None
        width = min(width, self._network.shape.draft_vocab_size)
        guess = partial(self._guessed, count, width)
        key = ("guesses", count, width)
        found = guess() if self.fixed is None else self.fixed.replayed(key, guess)
        rows = found.tolist()  # one copy to the host
        return [[int(one) for one in row[:width]] for row in rows], [row[width:] for row in rows]

    def _guessed(self, count: int, width: int) -> torch.Tensor:
        """Return likely tokens and their values of each guess, [g, 2 k]."""
        network, states, fixed = self._network, self._last, self.fixed
        if count > 1:
            masks = torch.full((count - 1,), network.shape.mask_token, device=self._device)
            begin = self._num_read if fixed is None else fixed.start
            positions = torch.arange(count - 1, device=self._device) + begin
            hidden = network.mask_hidden[0].expand(count - 1, -1)
            attends = self._after_text(count - 1)
            states = torch.cat((states, self._states(masks, hidden, positions, attends)))
        logits = network.logits(states, nn.Identity()).float()
        top = logits.log_softmax(dim=-1).topk(width, dim=-1)
        return torch.cat((network.token_ids(top.indices).double(), top.values.double()), dim=1)

    def _after_text(self, count: int) -> list[Attend]:
        """Return the attention of `count` rows, in each layer, to the text and to the rows up to each."""
        fixed, begin = self.fixed, self._num_read
        if fixed is not None:
            sees = torch.ones(count, count, dtype=torch.bool, device=self._device).tril()
            return [
                partial(fixed.attend_drafted, drafted=[], sees=sees, layer=layer)
                for layer in range(len(self._rows))
            ]
        for rows in self._rows:
            rows.length = begin  # those of an earlier draft are forgotten
        mask = causal_mask(begin, count, self._device)
        return [partial(rows.attend, mask=mask) for rows in self._rows]

    def _states(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attends: Sequence[Attend],
    ) -> torch.Tensor:
        """Return the states [n, D] of tokens [n] and hidden states [n, W * D] at positions [n]."""
        return self._network.states(token_ids, self._network.fused(hidden), positions, attends)


@dataclass(frozen=True, slots=True)
class PEagleConfig(Options):
    heads: str | None = option(None, HEADS)
    num_guesses: int | None = option(
        None,
        "tokens guessed in a pass (default: as many as the heads were trained for)",
        least=1,
        most=MAX_DRAFT,
    )


class PEagleDrafter(FusingDrafter):
    """Drafts the likeliest token of each place."""

    config_class = PEagleConfig
    kind = ParallelNetwork

    @property
    def num_drafted(self) -> int:
        return self.config.num_guesses or self._checkpoint.shape.num_guesses

    @torch.inference_mode()
    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        found = self._guessed(budget, 1)
        return DraftTree.chain([context[-1], *(row[0] for row in (found[0] if found else []))])

    @torch.inference_mode()
    def guesses(self, context: Sequence[int], budget: DraftBudget) -> Guesses | None:
        found = self._guessed(budget, GUIDE_WIDTH)
        if found is None:
            return None
        rows, values = found
        before = [ANY_TOKEN] * (len(rows) - 1)
        return Guesses([context[-1], *before], range(-1, len(rows) - 1), rows, values)

    def _guessed(
        self, budget: DraftBudget, width: int
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        text: Any = self.read_text()
        count = min(self.num_drafted, budget.max_depth)
        return text.guesses(count, width) if text and count else None

    def _text_of(self, target: TargetModel) -> Any:
        network = build_network(self._checkpoint, target.device, target.dtype)
        assert isinstance(network, ParallelNetwork)
        return ParallelText(network, target)

    @classmethod
    def write_untrained_heads(cls, folder: Path, config: Any) -> None:
        """Write random heads in the form of speculators."""
        cls.write_untrained(folder, config, num_layers=2, num_guesses=4)
