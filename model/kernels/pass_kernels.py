"""Functions that a model's passes use in place of its own, and the names under which its config knows them.

A model's config names its attention for all threads, so a function attends in passes of ours alone: other
threads that run the model meanwhile attend as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..machine.own_forwards import is_in_pass

# Transformers' name of its attention by torch's function.
USUAL = "sdpa"
# Arguments of transformers' attention functions that other functions do not support.
SPECIAL = ("position_bias", "softcap", "cache", "head_mask", "output_attentions")


def register_attention(name: str, function: Callable[..., Any]) -> str:
    """Register an attention function for passes with transformers; return its name."""

    def attention(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        attend = function if is_in_pass() else sdpa_attention_forward
        result: tuple[torch.Tensor, None] = attend(*arguments, **options)
        return result

    AttentionInterface.register(name, attention)
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


class PassKernels:
    """Functions that a model's passes use in place of its own.

    Args:
        name: name of these functions.
        is_plain: whether plain decoding counts as computing with them too, so that near-ties need no
            other functions: in half precision.
    """

    def __init__(self, name: str, is_plain: bool) -> None:
        self.name = name
        self._is_plain = is_plain
        self._is_off = False

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block passes compute as plain decoding does, bit for bit."""
        self._is_off = not self._is_plain
        try:
            yield
        finally:
            self._is_off = False
