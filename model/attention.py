"""Attention that does not copy keys and values once for every query head, and takes no detour for one query.

Transformers' sdpa attention repeats the keys and values of a group of query heads before it calls
the kernel whenever there is a mask, as there is with every tree: a copy of the whole cache, times
the size of a group, in every layer of every step. The kernel for the CPU reads grouped heads as
they are, to the same bits. On a GPU a mask would make it fall back to plain matrix products, so
that there transformers' own way stays.

The same kernel takes three times as long for one query of bfloat16 as for two, without AVX-512 (300 keys, 16
heads of 64: 378 and 132 us; 1,500 keys: 2.0 and 0.7 ms). There one query is given as two that are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_grouped"
# Arguments of transformers' attention functions that the kernel does not know.
SPECIAL = ("position_bias", "softcap", "cache", "head_mask", "output_attentions")


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend like transformers' sdpa attention, bit for bit, by the way that is fastest for the kernel.

    Args:
        module: the attention layer.
        query: [1, heads, n, D].
        key: [1, key-value heads, T, D].
        value: [1, key-value heads, T, D].
        attention_mask: boolean or additive, [1, 1, n, T]; without one transformers copies nothing.
        dropout: as in sdpa.
        scaling: as in sdpa.
        **kwargs: what a model may add; special ones go to transformers' function.

    Returns:
        The attended values [1, n, heads, D], and None for the weights.
    """
    is_special = any(all(kwargs.get(name) is not off for off in (None, False)) for name in SPECIAL)
    num_queries = query.shape[2]
    is_grouped = key.shape[1] < query.shape[1]
    # Transformers 5 groups the heads of a single query by itself, unless it is compiled.
    is_left_alone = num_queries == 1 and not torch.compiler.is_compiling()
    is_repeated = attention_mask is not None and is_grouped and not is_left_alone
    is_paired = num_queries == 1 and is_slow_alone(query.dtype, query.device)
    if is_special or not (is_repeated or is_paired):
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return result
    if is_paired:
        query = query.repeat(1, 1, 2, 1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=is_grouped
    )
    return attended[:, :, :num_queries].transpose(1, 2).contiguous(), None


def is_slow_alone(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether one query takes longer than two."""
    is_slow = dtype == torch.bfloat16 and device.type == "cpu"
    return is_slow and torch.backends.cpu.get_cpu_capability() == "AVX2"


def can_group_heads(model: PreTrainedModel) -> bool:
    """Whether the model has grouped heads, and its attention can be exchanged on this device."""
    config = model.config.get_text_config(decoder=True)
    num_heads = getattr(config, "num_attention_heads", None)
    num_key_value_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return num_key_value_heads != num_heads and _can_exchange(model)


def can_pair_queries(model: PreTrainedModel) -> bool:
    """Whether single queries are slow here, and the model's attention can be exchanged."""
    return is_slow_alone(model.dtype, model.device) and _can_exchange(model)


def _can_exchange(model: PreTrainedModel) -> bool:
    """Whether the model takes registered attention functions, uses sdpa, and runs on the CPU."""
    config = model.config.get_text_config(decoder=True)
    return (
        getattr(model, "_supports_attention_backend", False)
        and getattr(config, "_attn_implementation", None) == "sdpa"
        and model.device.type == "cpu"
    )


@contextmanager
def grouped_heads(config: Any) -> Iterator[None]:
    """Let the model of this config attend with `grouped_attention` within the block."""
    stock = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = stock


AttentionInterface.register(NAME, grouped_attention)
# The mask function too: without it, passes without a mask of ours would lose their windows.
AttentionMaskInterface.register(NAME, sdpa_mask)
