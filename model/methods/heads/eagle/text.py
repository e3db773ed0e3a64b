"""A draft network on one text: its rows of the text, and of the draft that is being grown.

Row p joins the feature of token p with the embedding of token p + 1 and stands at position p. The
text's rows are read from the target's true hidden states, once each; a draft's rows come after them,
level by level, and are forgotten when the next rows of the text are read.

Shapes: n new rows, T rows of the text, D hidden size, W hidden states side by side, Q tokens that
can be drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import nn

from ....machine.hardware import uploaded
from ..decoder_layer import Rows, causal_mask
from ..head_files import called
from .network import DraftNetwork


class DraftText:
    """The rows of a text; embedding and head are the target's, the device that of its token ids."""

    def __init__(
        self, network: DraftNetwork, embedding: nn.Module, head: nn.Module, device: torch.device
    ) -> None:
        self.network, self.head, self.device = network, head, device
        self._embedding = embedding
        parameter = next(network.parameters())
        self._dtype, self._network_device = parameter.dtype, parameter.device
        self.clear()

    def clear(self) -> None:
        self._rows = Rows(self.network.shape, self._network_device, self._dtype)
        self._num_read = 0
        self._last: torch.Tensor | None = None  # the state after the last row [1, D]

    def sibling(self) -> DraftText:
        """Return another text, with no row yet, for the same network."""
        sibling = copy(self)
        sibling.clear()
        return sibling

    def read(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Read rows: hidden states [n, W * D], and the token after each of them."""
        self._rows.length = self._num_read
        features = self.network.fused(hidden.to(self._network_device, self._dtype))
        tokens = uploaded(token_ids, self.device)
        begin, end = self._num_read, self._num_read + len(token_ids)
        positions = torch.arange(begin, end, device=self._network_device)
        mask = causal_mask(begin, end - begin, self._network_device)
        self._last = self._run(tokens, features, positions, mask)[-1:]
        self._num_read = end

    def draft(self) -> Draft | None:
        """Begin a draft after the last token read; None if nothing was read."""
        self._rows.length = self._num_read
        return None if self._last is None else Draft(self, self._last)

    def deepen(
        self, token_ids: torch.Tensor, features: torch.Tensor, is_ancestor: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Append drafted rows and return their states [n, D].

        Args:
            token_ids: [n].
            features: states of their parents [n, D].
            is_ancestor: which of the draft's rows, these included, each sees: [n, rows of the draft].
            depth: of the tokens in the draft, from 1.
        """
        of_text = is_ancestor.new_ones(len(token_ids), self._num_read)
        position = self._num_read + depth - 1
        positions = torch.full((1,), position, device=self._network_device)
        mask = torch.cat((of_text, is_ancestor), dim=1)
        return self._run(token_ids, features, positions, mask)

    def _run(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        embeddings = called(self._embedding, token_ids).to(self._network_device, self._dtype)
        states: torch.Tensor = self.network(
            embeddings, features, positions, lambda projected: self._rows.attend(projected, mask)
        )
        return states


class Draft:
    """A draft that grows level by level."""

    def __init__(self, text: DraftText, last: torch.Tensor) -> None:
        self._text = text
        self._states = last
        self._depth = 0
        self._is_ancestor = torch.zeros(1, 0, dtype=torch.bool, device=last.device)
        # Of the tokens after each node of the last level that was read, [n, Q]; first after the text, [1, Q].
        self.logits = text.network.logits(last, text.head)

    def deepen(self, parents: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Read a level of nodes: the place of each parent in the level before, and the tokens, both [n]."""
        count = len(parents)
        itself = torch.eye(count, dtype=torch.bool, device=self._is_ancestor.device)
        self._is_ancestor = torch.cat((self._is_ancestor[parents], itself), dim=1)
        self._depth += 1
        features = self._states[parents]
        self._states = self._text.deepen(token_ids, features, self._is_ancestor, self._depth)
        self.logits = self._text.network.logits(self._states, self._text.head)

    def token_ids(self, places: torch.Tensor) -> torch.Tensor:
        """Return the token ids of places among the logits."""
        return self._text.network.token_ids(places)
