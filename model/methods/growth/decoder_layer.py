"""A decoder layer of trained heads, and the rows that it keeps of a text.

Llama's layer on plain torch, with the names of the published checkpoints.

Shapes: n new rows, T rows in use, M capacity, D hidden size, H heads, d head dimension; leading
dimensions (a batch) are allowed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class LayerShape(NamedTuple):
    """Shape of a layer.

    Attributes:
        hidden_size: D.
        intermediate_size: width of the feed-forward part.
        num_heads, num_key_value_heads, head_dim: of the attention.
        norm_eps: epsilon of the norms.
        rope_theta: base of the rotary positions.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float

    @classmethod
    def of_config(cls, config: Any) -> LayerShape:
        """Return the shape of a target model's layers.

        Raises:
            ValueError: if the config is not that of a Llama with plain rotary positions.
        """
        size, num_heads = config.hidden_size, config.num_attention_heads
        # transformers 4 knows the rotary base under its own name only.
        rope = getattr(config, "rope_parameters", None) or {}
        scaling = getattr(config, "rope_scaling", None) or {}
        theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
        kind = rope.get("rope_type", scaling.get("rope_type", "default"))
        eps, wide = (getattr(config, name, None) for name in ("rms_norm_eps", "intermediate_size"))
        if theta is None or eps is None or not isinstance(wide, int) or kind != "default":
            raise ValueError(
                f"model type {config.model_type}: these heads have a layer of the model's kind, and know "
                "Llama's alone; allowed: RMS norms, one gated feed-forward part and unscaled rotary positions"
            )
        return cls(
            hidden_size=size,
            intermediate_size=wide,
            num_heads=num_heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or size // num_heads,
            norm_eps=eps,
            rope_theta=theta,
        )


class RMSNorm(nn.Module):
    """Llama's norm: mean square in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the normed states [..., D]."""
        wide = states.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        scaled: torch.Tensor = self.weight * normed.to(states.dtype)
        return scaled


class Attention(nn.Module):
    """Attention with rotary positions."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        size, self._head_dim = shape.hidden_size, shape.head_dim
        query_width = shape.num_heads * shape.head_dim
        key_value_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(size, query_width, bias=False)
        self.k_proj = nn.Linear(size, key_value_width, bias=False)
        self.v_proj = nn.Linear(size, key_value_width, bias=False)
        self.o_proj = nn.Linear(query_width, size, bias=False)
        self._theta = shape.rope_theta

    def forward(self, states: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        """Return the attention's output for states [..., n, D], each seeing those before it.

        Args:
            states: after all rows, or a text of its own.
            rows: the text's rows so far; they grow. None: the states are whole texts.
        """
        queries, keys, values = (
            layer(states).unflatten(-1, (-1, self._head_dim)).transpose(-3, -2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )  # [..., H, n, d]
        begin, count = rows.length if rows else 0, states.shape[-2]
        cos, sin = self._angles(begin, count, states)
        queries, keys = _rotated(queries, cos, sin), _rotated(keys, cos, sin)
        if rows is not None:
            keys, values = rows.append(keys, values)
        mask = None
        if begin and count > 1:  # a single row sees all
            mask = torch.ones(count, begin + count, dtype=torch.bool, device=states.device)
            mask = mask.tril(begin)
        found = F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=not begin and count > 1, enable_gqa=True
        )
        output: torch.Tensor = self.o_proj(found.transpose(-3, -2).flatten(-2))
        return output

    def _angles(
        self, begin: int, count: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [n, d] of positions, computed in float32."""
        device, size = like.device, self._head_dim
        powers = torch.arange(0, size, 2, device=device).float() / size
        positions = torch.arange(begin, begin + count, device=device).float()
        angles = positions[:, None] / self._theta**powers
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class FeedForward(nn.Module):
    """Llama's gated feed-forward layer."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        size, wide = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(size, wide, bias=False)
        self.up_proj = nn.Linear(size, wide, bias=False)
        self.down_proj = nn.Linear(wide, size, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the transformed states [..., D]."""
        gated = F.silu(self.gate_proj(states)) * self.up_proj(states)
        lowered: torch.Tensor = self.down_proj(gated)
        return lowered


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and with a residual."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, states: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        """Return the layer's output [..., n, D]; arguments as `Attention`."""
        states = states + self.self_attn(self.input_layernorm(states), rows)
        output: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class Rows:
    """Keys and values of a text, for one layer.

    Attributes:
        length: rows in use T.
    """

    # The capacity grows by this many rows when it is full: the text's final length is unknown.
    MORE = 512

    def __init__(self, shape: LayerShape, device: torch.device, dtype: torch.dtype) -> None:
        self.length = 0
        size = (2, shape.num_key_value_heads, 0, shape.head_dim)
        self._buffer = torch.empty(size, device=device, dtype=dtype)  # [2, heads, M, d]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append n rows, each [heads, n, d]; return all keys and values [heads, T, d]."""
        begin, end = self.length, self.length + keys.shape[-2]
        if end > self._buffer.shape[2]:
            heads, size = self._buffer.shape[1], self._buffer.shape[3]
            more = self._buffer.new_empty((2, heads, end - begin + self.MORE, size))
            self._buffer = torch.cat((self._buffer[:, :, :begin], more), dim=2)
        self._buffer[0, :, begin:end] = keys
        self._buffer[1, :, begin:end] = values
        self.length = end
        return self._buffer[0, :, :end], self._buffer[1, :, :end]


def _rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return rows [..., n, d] turned by their positions' angles."""
    first, second = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat((-second, first), dim=-1) * sin
