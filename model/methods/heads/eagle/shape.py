"""Shapes of a draft network, from the `config.json` of its checkpoint.

The published configs are those of Llama with one layer. What a network of ours would not compute as
the authors' does is refused: another activation, scaled rotary positions, more layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..decoder_layer import LayerShape

# Options of a Llama config that must have one value here, with the value of a config without them.
FIXED: Mapping[str, tuple[Any, Any]] = {
    "num_hidden_layers": (1, 1),
    "hidden_act": ("silu", "silu"),
    "rope_scaling": (None, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape(LayerShape):
    """Shape of a draft network: of its layer, with the target model's hidden size, and of what is around it."""

    vocab_size: int  # V, of the target model
    # Tokens that the network can draft; V unless it has an output head of its own.
    draft_vocab_size: int
    has_fc_bias: bool = True  # whether the layer that joins embedding and feature has a bias
    has_qkv_bias: bool = False  # whether queries, keys and values have one
    # Layers of the target model whose inputs are fused (EAGLE-3); empty: low, middle and high ones, by
    # the number of its layers.
    hidden_layers: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> NetworkShape:
        """Read the shape from the `config.json` of the checkpoint `name`.

        Raises:
            ValueError: if an entry is missing, of another kind, or not supported.
        """
        for key, (allowed, default) in FIXED.items():
            if config.get(key, default) != allowed:
                raise ValueError(f"heads {name}: {key} is {config[key]!r}; allowed: {allowed!r}")
        take = _Taker(config, name)
        hidden_size, num_heads = take("hidden_size"), take("num_attention_heads")
        if config.get("target_hidden_size", hidden_size) != hidden_size:
            raise ValueError(
                f"heads {name}: have a hidden size of {hidden_size}, and of {config['target_hidden_size']} for "
                "the target model; allowed: the same"
            )
        vocab_size = take("vocab_size")
        return cls(
            hidden_size=hidden_size,
            intermediate_size=take("intermediate_size"),
            num_heads=num_heads,
            num_key_value_heads=take("num_key_value_heads", num_heads),
            head_dim=take("head_dim", hidden_size // num_heads),
            vocab_size=vocab_size,
            draft_vocab_size=take("draft_vocab_size", vocab_size),
            norm_eps=take("rms_norm_eps", 1e-6, float),
            rope_theta=take("rope_theta", 10000.0, float),
            has_fc_bias=bool(config.get("bias", True)),
            has_qkv_bias=bool(config.get("qkv_bias", False)),
            hidden_layers=take.layers("hidden_layers"),
        )

    def to_config(self) -> dict[str, Any]:
        """Return the config of a checkpoint of this shape."""
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "bias": self.has_fc_bias,
            "qkv_bias": self.has_qkv_bias,
        }
        return config | ({"hidden_layers": list(self.hidden_layers)} if self.hidden_layers else {})


class _Taker:
    """Takes entries of a config; raises ValueError for those that are missing or no positive numbers."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def __call__(self, key: str, default: Any = None, kind: Callable[[Any], Any] = int) -> Any:
        value = self._config.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(
                f"heads {self._name}: config.json has {key} {value!r}; allowed: a positive number"
            )
        return kind(value)

    def layers(self, key: str) -> tuple[int, ...]:
        value = self._config.get(key) or []
        if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
            raise ValueError(
                f"heads {self._name}: config.json has {key} {value!r}; allowed: a list of layer numbers"
            )
        return tuple(value)
