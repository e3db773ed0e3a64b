"""The draft networks: EAGLE's (used by EAGLE-2 too) and EAGLE-3's, with the names of their checkpoints.

Both read, for every token of the text, its embedding and the hidden states of the target model after
the token before it (the feature), and return a state from which the next token is guessed. For a
drafted token the state of its parent takes the feature's place.

Shapes: n rows, D hidden size, V vocabulary of the target model, W fused layers, Q tokens that can be
drafted; leading dimensions (a batch) are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ..decoder_layer import DecoderLayer, Projected, RMSNorm
from ..head_files import called
from .shape import NetworkShape

# What is attended to, by the caller: [..., H, n, d] of n projected rows.
Attend = Callable[[Projected], torch.Tensor]
# Hidden states that EAGLE-3 fuses: inputs of a low, a middle and a high layer.
NUM_FUSED = 3


class LayerInput(NamedTuple):
    """The input of a draft network's layer: residual [..., n, D], and rows for its attention."""

    residual: torch.Tensor
    rows: torch.Tensor


class DraftNetwork(nn.Module):
    """Base of the draft networks."""

    # Beginning of the names that only a checkpoint of this kind has.
    marker = ""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape

    @property
    def layer(self) -> DecoderLayer:
        """The decoder layer."""
        raise NotImplementedError

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features [..., n, D] of the target's hidden states [..., n, W * D]."""
        raise NotImplementedError

    def layer_input(self, embeddings: torch.Tensor, features: torch.Tensor) -> LayerInput:
        """Join embeddings and features, both [..., n, D]."""
        raise NotImplementedError

    def logits(self, states: torch.Tensor, head: nn.Module) -> torch.Tensor:
        """Return the logits [..., n, Q] of states [..., n, D]; `head` is the target's output head."""
        raise NotImplementedError

    def token_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids of places among the logits."""
        return draft_ids

    def forward(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Return the states [..., n, D] of embeddings and features [..., n, D] at positions [n]."""
        given = self.layer_input(embeddings, features)
        attended = attend(self.layer.self_attn.project(given.rows, positions))
        return self.layer.finish(given.residual, attended)


class EagleNetwork(DraftNetwork):
    """EAGLE: a joined row goes through a layer without a norm before its attention, to the target's own head."""

    marker = "layers."

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=shape.has_fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(shape, has_bias=shape.has_qkv_bias)])

    @property
    def layer(self) -> DecoderLayer:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states as they are."""
        return hidden

    def layer_input(self, embeddings: torch.Tensor, features: torch.Tensor) -> LayerInput:
        """Join embeddings and features by a linear layer."""
        joined = self.fc(torch.cat((embeddings, features), dim=-1))
        return LayerInput(joined, joined)

    def logits(self, states: torch.Tensor, head: nn.Module) -> torch.Tensor:
        """Return the target's own head's logits: a state guesses a final hidden state."""
        return called(head, states)


class FusingLayer(DecoderLayer):
    """EAGLE-3's layer: its attention reads embedding and feature side by side, each normed."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size, shape.has_qkv_bias)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Eagle3Network(DraftNetwork):
    """EAGLE-3: hidden states of three layers are fused; the output head is its own, over fewer tokens."""

    marker = "midlayer."

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(NUM_FUSED * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = FusingLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.has_own_vocabulary = shape.draft_vocab_size < shape.vocab_size
        if self.has_own_vocabulary:
            offsets = torch.zeros(shape.draft_vocab_size, dtype=torch.long)
            self.register_buffer("d2t", offsets)  # token id less place, of every place
            can_draft = torch.zeros(shape.vocab_size, dtype=torch.bool)
            self.register_buffer("t2d", can_draft)  # whether a token can be drafted

    @property
    def layer(self) -> DecoderLayer:
        return self.midlayer

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return three hidden states, fused by a linear layer."""
        fused: torch.Tensor = self.fc(hidden)
        return fused

    def layer_input(self, embeddings: torch.Tensor, features: torch.Tensor) -> LayerInput:
        """Put normed embeddings and features side by side; features go on past the attention."""
        layer = self.midlayer
        normed = (layer.input_layernorm(embeddings), layer.hidden_norm(features))
        return LayerInput(features, torch.cat(normed, dim=-1))

    def logits(self, states: torch.Tensor, head: nn.Module) -> torch.Tensor:
        """Return the own head's logits of the normed states."""
        logits: torch.Tensor = self.lm_head(self.norm(states))
        return logits

    def token_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids of places in the own vocabulary."""
        if not self.has_own_vocabulary:
            return draft_ids
        assert isinstance(self.d2t, torch.Tensor)
        return draft_ids + self.d2t[draft_ids]
