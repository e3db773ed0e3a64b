"""Batched generation by transformers, for many answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


@torch.no_grad()
def continued(
    model: Any,
    texts: Sequence[list[int]],
    pad: int,
    eos: int,
    batch_size: int,
    **options: object,
) -> list[list[int]]:
    """Return the tokens after each text, up to an eos (included).

    Args:
        model: of transformers.
        texts: token ids, padded on the left within a batch.
        pad: token id of the padding.
        eos: token id that ends a text.
        batch_size: texts at once.
        options: of `generate`.
    """
    results: list[list[int]] = []
    for start in range(0, len(texts), batch_size):
        group = texts[start : start + batch_size]
        width = max(map(len, group))
        token_ids = torch.tensor([[pad] * (width - len(text)) + text for text in group])
        mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in group])
        output = model.generate(
            token_ids.to(model.device), attention_mask=mask.to(model.device), **options
        )
        for row in output[:, width:].tolist():
            results.append(row[: row.index(eos) + 1] if eos in row else row)
    return results
