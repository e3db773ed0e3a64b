"""The draft networks: EAGLE's (used by EAGLE-2 too), EAGLE-3's and P-EAGLE's, with the names of their checkpoints.

Both read, for every token of the text, its embedding and the hidden states of the target model after
the token before it (the feature), and return a state from which the next token is guessed. For a
drafted token the state of its parent takes the feature's place.

Shapes of a network are those of its checkpoint's `config.json`: Llama's, with one layer but for P-EAGLE's.
What a network of ours would not compute as the authors' does is refused: another activation, scaled rotary
positions, more layers.

Shapes: n rows, D hidden size, V vocabulary of the target model, W fused layers, Q tokens that can be
drafted; leading dimensions (a batch) are allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..head_files import called
from ..layers import Attend, DecoderLayer, HeadShape, RMSNorm, entry

# Hidden states that EAGLE-3 fuses: inputs of a low, a middle and a high layer.
NUM_FUSED = 3
# Of P-EAGLE, where a checkpoint does not say: as its authors train it.
DEFAULT_GUESSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape(HeadShape):
    """Shape of a draft network: of its layer, with the target model's hidden size, and of what is around it."""

    vocab_size: int  # V, of the target model
    # Tokens that the network can draft; V unless it has an output head of its own.
    draft_vocab_size: int
    has_fc_bias: bool = True  # whether the layer that joins embedding and feature has a bias
    has_qkv_bias: bool = False  # whether queries, keys and values have one
    # Layers of the target model whose inputs are fused (EAGLE-3); empty: low, middle and high ones, by
    # the number of its layers.
    hidden_layers: tuple[int, ...] = ()
    has_norms: bool = False  # whether queries and keys are normed, as in Qwen3
    norms_residual: bool = False  # whether the residual is the normed feature
    # Of P-EAGLE: the token whose embedding stands for an unknown one, layers, and guesses of a pass as trained.
    mask_token: int = 0
    num_layers: int = 1
    num_guesses: int = 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> NetworkShape:
        """Read the shape from the `config.json` of the checkpoint `name`, or raise ValueError for an entry."""
        if "speculators_model_type" in config:
            return cls._from_speculators(config, name)
        if (count := config.get("num_hidden_layers", 1)) != 1:
            raise ValueError(f"heads {name}: num_hidden_layers is {count!r}; allowed: 1")
        vocab_size = entry(config, name, "vocab_size")
        layers = config.get("hidden_layers") or []
        if not isinstance(layers, list) or not all(type(one) is int and one >= 0 for one in layers):
            raise ValueError(
                f"heads {name}: config.json has hidden_layers {layers!r}; allowed: a list of layer numbers"
            )
        return cls(
            **cls.entries(config, name),
            vocab_size=vocab_size,
            draft_vocab_size=entry(config, name, "draft_vocab_size", vocab_size),
            has_fc_bias=bool(config.get("bias", True)),
            has_qkv_bias=bool(config.get("qkv_bias", False)),
            hidden_layers=tuple(layers),
        )

    @classmethod
    def _from_speculators(cls, config: Mapping[str, Any], name: str) -> NetworkShape:
        """Read the shape of an EAGLE-3 checkpoint of the package speculators."""
        layer = config.get("transformer_layer_config") or {}
        for key in ("norm_before_fc", "fc_norm", "norm_output"):
            if config.get(key):
                raise ValueError(f"heads {name}: {key} is {config[key]!r}; allowed: False")
        vocab_size = entry(layer, name, "vocab_size")
        mask_token = config.get("mask_token_id") or 0
        if type(mask_token) is not int or not 0 <= mask_token < vocab_size:
            raise ValueError(
                f"heads {name}: config.json has mask_token_id {mask_token!r}; allowed: 0 to {vocab_size - 1}"
            )
        proposal: Any = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        return cls(
            **cls.entries(layer, name),
            vocab_size=vocab_size,
            draft_vocab_size=entry(config, name, "draft_vocab_size", vocab_size),
            mask_token=mask_token,
            num_layers=entry(layer, name, "num_hidden_layers", 1),
            num_guesses=entry(proposal[0], name, "speculative_tokens", DEFAULT_GUESSES),
            hidden_layers=tuple(config.get("eagle_aux_hidden_state_layer_ids") or ()),
            has_norms=layer.get("model_type", "qwen3") == "qwen3",
            norms_residual=bool(config.get("norm_before_residual", False)),
        )

    def to_config(self) -> dict[str, Any]:
        """Return the config of a checkpoint: of the authors' form, of P-EAGLE's that of speculators."""
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.num_layers,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "bias": self.has_fc_bias,
            "qkv_bias": self.has_qkv_bias,
        }
        if self.num_guesses > 1:
            layer = config | {"model_type": "qwen3" if self.has_norms else "llama"}
            return {
                "speculators_model_type": "peagle",
                "transformer_layer_config": layer,
                "draft_vocab_size": self.draft_vocab_size,
                "eagle_aux_hidden_state_layer_ids": list(self.hidden_layers),
                "norm_before_residual": self.norms_residual,
                "mask_token_id": self.mask_token,
                "speculators_config": {
                    "proposal_methods": [{"speculative_tokens": self.num_guesses}]
                },
            }
        return config | ({"hidden_layers": list(self.hidden_layers)} if self.hidden_layers else {})


class DraftNetwork(nn.Module):
    """Base of the draft networks; what a subclass does not say is EAGLE's."""

    # Beginning of the names that only a checkpoint of this kind has.
    marker = ""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features [..., n, D] of the target's hidden states [..., n, W * D]."""
        return hidden

    def joined(
        self, embeddings: torch.Tensor, features: torch.Tensor
    ) -> tuple[DecoderLayer, torch.Tensor, torch.Tensor]:
        """Return the layer, its residual [..., n, D], and the rows for its attention."""
        raise NotImplementedError

    def forward(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Return the states [..., n, D] of embeddings and features [..., n, D] at positions [n]."""
        layer, residual, rows = self.joined(embeddings, features)
        return layer.run(residual, rows, positions, attend)

    def logits(self, states: torch.Tensor, head: nn.Module) -> torch.Tensor:
        """Return the logits [..., n, Q] of states [..., n, D]; `head` is the target's output head."""
        return called(head, states)

    def token_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids of places among the logits."""
        return draft_ids


class EagleNetwork(DraftNetwork):
    """EAGLE: a joined row goes through a layer without a norm before its attention, to the target's own head."""

    marker = "layers."

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=shape.has_fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(shape, has_bias=shape.has_qkv_bias)])

    def joined(
        self, embeddings: torch.Tensor, features: torch.Tensor
    ) -> tuple[DecoderLayer, torch.Tensor, torch.Tensor]:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        joined = self.fc(torch.cat((embeddings, features), dim=-1))
        return layer, joined, joined


class FusingLayer(DecoderLayer):
    """EAGLE-3's layer: its attention reads embedding and feature side by side, each normed."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size, shape.has_qkv_bias, shape.has_norms)
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

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.fc(hidden)
        return fused

    def joined(
        self, embeddings: torch.Tensor, features: torch.Tensor
    ) -> tuple[DecoderLayer, torch.Tensor, torch.Tensor]:
        layer = self.midlayer
        normed = (layer.input_layernorm(embeddings), layer.hidden_norm(features))
        residual = normed[1] if self.shape.norms_residual else features
        return layer, residual, torch.cat(normed, dim=-1)

    def logits(self, states: torch.Tensor, head: nn.Module) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(states))
        return logits

    def token_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        if not self.has_own_vocabulary:
            return draft_ids
        assert isinstance(self.d2t, torch.Tensor)
        return draft_ids + self.d2t[draft_ids]


class FollowingLayer(DecoderLayer):
    """A layer that reads the states of the one before it."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape, has_bias=shape.has_qkv_bias, has_norms=shape.has_norms)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)


class ParallelNetwork(Eagle3Network):
    """P-EAGLE: EAGLE-3 with more layers, an embedding of its own, and a row that stands for an unknown token."""

    marker = "mask_hidden"

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.following = nn.ModuleList(FollowingLayer(shape) for _ in range(shape.num_layers - 1))
        # In place of the hidden states before an unknown token.
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, NUM_FUSED * shape.hidden_size))

    def states(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attends: Sequence[Attend],
    ) -> torch.Tensor:
        """Return the states [n, D] of tokens [n] and features [n, D] at positions [n]; `attends` by layer."""
        # Some prompts' tokens have no logit, and then no embedding here.
        is_known = token_ids < self.shape.vocab_size
        embeddings = self.embed_tokens(torch.where(is_known, token_ids, self.shape.mask_token))
        states: torch.Tensor = self(embeddings, features, positions, attends[0])
        for layer, attend in zip(self.following, attends[1:], strict=True):
            assert isinstance(layer, FollowingLayer)
            states = layer.run(states, layer.input_layernorm(states), positions, attend)
        return states
