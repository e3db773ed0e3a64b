"""Layers of trained heads: a decoder layer, the rows that it keeps of a text, and residual blocks.

Llama's layer on plain torch, with the names of the published checkpoints.

Shapes: n new rows, T rows in use, M capacity, D hidden size, H heads, d head dimension; leading
dimensions (a batch) are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...machine.hardware import uploaded


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Shape of a layer, in the terms of Llama's config."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @staticmethod
    def entries(config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return the arguments of a shape from a Llama's or Qwen3's config, that of the checkpoint `name`.

        Raises:
            ValueError: for an entry that is missing, or that these layers would not compute as the authors' do.
        """
        rope = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or {"rope_type": rope.get("rope_type", "default")}
        kinds = config.get("layer_types") or ["full_attention"]
        found = {
            "hidden_act": (config.get("hidden_act", "silu"), "silu"),
            "rope_scaling": (scaling.get("rope_type", scaling.get("type", "unknown")), "default"),
            "attention_bias": (bool(config.get("attention_bias", False)), False),
            "layer_types": (", ".join(sorted(set(kinds))), "full_attention"),
        }
        for key, (value, allowed) in found.items():
            if value != allowed:
                raise ValueError(f"heads {name}: {key} is {value!r}; allowed: {allowed!r}")
        take = partial(entry, config, name)
        size, num_heads = take("hidden_size"), take("num_attention_heads")
        if config.get("target_hidden_size") not in (None, size):
            raise ValueError(
                f"heads {name}: have a hidden size of {size}, and of {config['target_hidden_size']} for "
                "the target model; allowed: the same"
            )
        theta = rope.get("rope_theta", 10000.0)
        return {
            "hidden_size": size,
            "intermediate_size": take("intermediate_size"),
            "num_heads": num_heads,
            "num_key_value_heads": take("num_key_value_heads", num_heads),
            "head_dim": take("head_dim", size // num_heads),
            "norm_eps": take("rms_norm_eps", 1e-6, float),
            "rope_theta": take("rope_theta", theta, float),
        }

    @classmethod
    def of_config(cls, config: Any) -> HeadShape:
        """Return the shape of a target model's layers, or raise ValueError if they are not Llama's."""
        size, num_heads = config.hidden_size, config.num_attention_heads
        # transformers 4 knows the rotary base under its own name only.
        rope = getattr(config, "rope_parameters", None) or {}
        scaling = getattr(config, "rope_scaling", None) or {}
        theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
        kind = rope.get("rope_type", scaling.get("rope_type", "default"))
        eps, wide = (getattr(config, name, None) for name in ("rms_norm_eps", "intermediate_size"))
        if theta is None or eps is None or not isinstance(wide, int) or kind != "default":
            raise ValueError(
                f"model type {config.model_type}: these heads have a layer of the model's kind, and support "
                "only Llama's; allowed: RMS norms, one gated feed-forward part and unscaled rotary positions"
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


def entry(
    config: Mapping[str, Any],
    name: str,
    key: str,
    default: Any = None,
    kind: Callable[[Any], Any] = int,
) -> Any:
    """Return an entry of a checkpoint's config; raises ValueError if it is missing or no positive number."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ValueError(
            f"heads {name}: config.json has {key} {value!r}; allowed: a positive number"
        )
    return kind(value)


class RMSNorm(nn.Module):
    """Llama's norm: mean square in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        scaled: torch.Tensor = self.weight * normed.to(states.dtype)
        return scaled


class Projected(NamedTuple):
    """Queries [..., H, n, d], keys and values [..., key-value heads, n, d] of n rows, rotated."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


# What is attended to, by the caller: [..., H, n, d] of n projected rows.
Attend = Callable[[Projected], torch.Tensor]


class Attention(nn.Module):
    """The projections of an attention layer; what they attend to is the caller's choice.

    `has_norms`: whether queries and keys are normed, head by head, as Qwen3's.
    """

    def __init__(
        self, shape: HeadShape, width: int, has_bias: bool, has_norms: bool = False
    ) -> None:
        super().__init__()
        self._head_dim, self._has_norms = shape.head_dim, has_norms
        if has_norms:
            self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        query_width = shape.num_heads * shape.head_dim
        key_value_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(width, query_width, bias=has_bias)
        self.k_proj = nn.Linear(width, key_value_width, bias=has_bias)
        self.v_proj = nn.Linear(width, key_value_width, bias=has_bias)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)
        steps = torch.arange(0, shape.head_dim, 2, device="cpu").float() / shape.head_dim
        # float32 [d / 2], whatever the weights' dtype
        self._frequencies = 1.0 / shape.rope_theta**steps

    def project(self, rows: torch.Tensor, positions: torch.Tensor) -> Projected:
        """Return queries, keys and values of rows [..., n, width] at positions [n] (or [1], for all)."""
        queries, keys, values = (
            layer(rows).unflatten(-1, (-1, self._head_dim)).transpose(-3, -2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self._has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        self._frequencies = uploaded(self._frequencies, positions.device)
        angles = positions.float()[:, None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)  # [n, d]
        cos, sin = angles.cos().to(rows.dtype), angles.sin().to(rows.dtype)
        return Projected(_rotated(queries, cos, sin), _rotated(keys, cos, sin), values)


class FeedForward(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, wide = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(size, wide, bias=False)
        self.up_proj = nn.Linear(size, wide, bias=False)
        self.down_proj = nn.Linear(wide, size, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        gated = F.silu(self.gate_proj(states)) * self.up_proj(states)
        lowered: torch.Tensor = self.down_proj(gated)
        return lowered


class DecoderLayer(nn.Module):
    """Attention and feed-forward of trained heads, without the norms before the attention.

    The attention reads rows of `width`, None: D. `has_bias`: whether queries, keys and values have one;
    `has_norms`: as of `Attention`.
    """

    def __init__(
        self,
        shape: HeadShape,
        width: int | None = None,
        has_bias: bool = False,
        has_norms: bool = False,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(shape, width or shape.hidden_size, has_bias, has_norms)
        self.mlp = FeedForward(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def run(
        self, residual: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return the output [..., n, D] of a residual, and of the rows [..., n, width] that the attention reads."""
        attended = attend(self.self_attn.project(rows, positions))
        states = residual + self.self_attn.o_proj(attended.transpose(-3, -2).flatten(-2))
        output: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


def attend_rows(
    projected: Projected, mask: torch.Tensor | None, is_causal: bool = False
) -> torch.Tensor:
    """Return the attention [..., H, n, d]; mask boolean [n, T], None: every row sees all, or all before it."""
    queries, keys, values = projected
    return F.scaled_dot_product_attention(
        queries, keys, values, mask, is_causal=is_causal, enable_gqa=True
    )


def causal_mask(begin: int, count: int, device: torch.device) -> torch.Tensor | None:
    """Return the mask [n, T] of `count` rows after `begin` others; None for one row, which sees all."""
    if count == 1:
        return None
    return torch.ones(count, begin + count, dtype=torch.bool, device=device).tril(begin)


class HeadRows:
    """Keys and values of a text, and of the draft after it, for one layer."""

    # The capacity grows by this many rows when it is full: the text's final length is unknown.
    MORE = 512

    def __init__(self, shape: HeadShape, device: torch.device, dtype: torch.dtype) -> None:
        self.length = 0  # rows in use T
        size = (2, shape.num_key_value_heads, 0, shape.head_dim)
        self._buffer = torch.empty(size, device=device, dtype=dtype)  # [2, heads, M, d]

    def append(self, projected: Projected) -> None:
        """Append n rows."""
        begin, end = self.length, self.length + projected.keys.shape[-2]
        if end > self._buffer.shape[2]:
            heads, size = self._buffer.shape[1], self._buffer.shape[3]
            more = self._buffer.new_empty((2, heads, end - begin + self.MORE, size))
            self._buffer = torch.cat((self._buffer[:, :, :begin], more), dim=2)
        self._buffer[0, :, begin:end] = projected.keys
        self._buffer[1, :, begin:end] = projected.values
        self.length = end

    def attend(self, projected: Projected, mask: torch.Tensor | None) -> torch.Tensor:
        """Append n rows and return their attention to all [H, n, d]; mask as `attend_rows`'s, [n, T + n]."""
        self.append(projected)
        keys, values = self._buffer[:, :, : self.length]
        # A batch of one: without it, torch takes a slow path.
        batched = Projected(projected.queries[None], keys[None], values[None])
        return attend_rows(batched, mask)[0]


def _rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat((-second, first), dim=-1) * sin


class ResidualBlock(nn.Module):
    """x + silu(W x + b); with several inputs side by side, R x takes the place of x."""

    def __init__(self, size: int, num_inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs * size, size)
        self.res_connection = (
            nn.Identity() if num_inputs == 1 else nn.Linear(num_inputs * size, size)
        )
        nn.init.zeros_(self.linear.weight)  # training begins at the input itself

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [..., C * D] to [..., D]."""
        skipped: torch.Tensor = self.res_connection(inputs)
        return skipped + F.silu(self.linear(inputs))
