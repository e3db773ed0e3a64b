"""Registers attention functions under names that transformers' models can use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# Transformers' name of its attention by torch's function.
USUAL = "sdpa"
# Arguments of transformers' attention functions that other functions do not support.
SPECIAL = ("position_bias", "softcap", "cache", "head_mask", "output_attentions")


def register_attention(name: str, function: Callable[..., Any]) -> str:
    """Register an attention function with transformers; return its name."""
    AttentionInterface.register(name, function)
    # The mask function too, or passes without our mask would lose their windows.
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def is_special(options: dict[str, Any]) -> bool:
    """Whether the arguments need a feature that only transformers' own attention functions have."""
    return any(all(options.get(name) is not off for off in (None, False)) for name in SPECIAL)


def usual_attention(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Attend by transformers' sdpa attention; arguments and result as there."""
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(*arguments, **options)
    return result
