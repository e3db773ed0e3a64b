"""Attention over several texts in one pass: text by text, with the function that a pass of one text uses.

Shapes: B texts, S queries of all texts in each of H heads, T keys of the longest text in each of K heads; D and E
numbers in a key and a value.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from .pass_kernels import register_attention

# Transformers' name of the attention that each model writes in plain torch, in its own module.
EAGER = "eager"
PREFIX = "packed_"


class TextRows(NamedTuple):
    """The rows of all texts in a layer.

    Attributes:
        sizes: queries of each text, S in all.
        rows: keys [1, K, T, D] and values [1, K, T, E] of each text, its new ones included.
        is_masked: whether the mask of a single query says anything.
    """

    sizes: Sequence[int]
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]]
    is_masked: bool


def with_texts(keys: torch.Tensor, texts: TextRows) -> torch.Tensor:
    """Return the new keys [1, K, S, D], tied to the rows of all texts: models hand on this very tensor."""
    keys.of_texts = texts  # type: ignore[attr-defined]
    return keys


def packed_name(name: str) -> str:
    """Return the name of a registered function's counterpart that attends text by text; made at the first call."""
    packed = PREFIX + name
    if packed not in AttentionInterface():
        register_attention(packed, _TextByText(name))
    return packed


class _TextByText:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *arguments: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend.

        Args:
            module: the attention layer.
            query: [1, H, S, D].
            key: [1, K, S, D], from `with_texts`; without texts the model has made other keys of them.
            value: unused, as the texts have theirs.
            attention_mask: additive, [1, 1, S, T]; a text's row begins with its own keys.
            *arguments: as of the text's own function.
            **options: likewise.

        Returns:
            The attended values [1, S, H, E], and None for the weights.

        Raises:
            AttributeError: if the keys are not those of the cache.
        """
        texts: TextRows = key.of_texts  # type: ignore[attr-defined]
        attend = AttentionInterface()[self._name] if self._name != EAGER else _eager(module)
        outputs, begin = [], 0
        for size, (keys, values) in zip(texts.sizes, texts.rows, strict=True):
            end = begin + size
            mask = None
            if attention_mask is not None and (size > 1 or texts.is_masked):
                mask = attention_mask[:, :, begin:end, : keys.shape[2]]
            found = attend(
                module, query[:, :, begin:end], keys, values, mask, *arguments, **options
            )
            outputs.append(found[0])
            begin = end
        return torch.cat(outputs, dim=1), None


def _eager(module: torch.nn.Module) -> Any:
    return sys.modules[type(module).__module__].eager_attention_forward
