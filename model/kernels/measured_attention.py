"""The attention of passes over a few rows on a GPU: transformers' own, or a faster one, by measurement.

Which one is faster depends on the device and on the lengths (`model.kernels.choice`). Before a pass only
its number of rows is known, so one function is registered for each number of rows; it holds the choice
for every number of keys. Equal choices share a function.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from .choice import KEYS, Attend, Choice, LayerHeads, bucket, measured_choice
from .folded import can_fold, folded_products, folded_sdpa
from .registered import USUAL, is_special, register_attention, usual_attention

# Beside the usual one; names differ in their first letters.
FOLDED: dict[str, Attend] = {"folded": folded_sdpa, "products": folded_products}


def measured_attention(
    names: tuple[str, ...],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the function that was measured fastest for this number of keys.

    It was measured for one text. With several, each of which gives torch's kernel blocks of its own, heads are
    folded if they share keys.

    Unsupported cases go to transformers' function: passes without a mask, masks that differ by head,
    dropout, gradients, special arguments.

    The first argument has the names of the functions, for each of `choice.KEYS`; the others and the
    result are those of transformers' attention functions.
    """
    function = FOLDED.get(names[bucket(key.shape[2], KEYS)])
    if function is not None and len(query) > 1:
        function = folded_sdpa if key.shape[1] < query.shape[1] else None
    is_refused = dropout or is_special(kwargs) or torch.is_grad_enabled()
    if (
        function is None
        or is_refused
        or attention_mask is None
        or not can_fold(query, key, value, attention_mask)
    ):
        return usual_attention(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return function(query, key, value, attention_mask, scale), None


def first_letters(names: Sequence[str]) -> str:
    return "".join(name[0] for name in names)


def registered(names: tuple[str, ...]) -> str:
    """Return the name of `measured_attention` with these names; "" if all are the usual one."""
    if set(names) == {USUAL}:
        return ""
    return register_attention(
        f"measured_{first_letters(names)}", partial(measured_attention, names)
    )


@cache
def choice_on_gpu(
    heads: LayerHeads, dtype: torch.dtype, device: torch.device, is_replayed: bool
) -> Choice:
    """Return the fastest attention on a GPU: measured once a process; () if nothing can be folded."""
    if not heads.num_heads or heads.num_heads % heads.num_key_heads:
        return ()
    num_groups = heads.num_heads // heads.num_key_heads
    layer = SimpleNamespace(num_key_value_groups=num_groups, is_causal=True)

    def usual(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        return usual_attention(layer, query, key, value, mask, scaling=scale)[0]

    # Without groups nothing is folded, and torch's attention is the usual one.
    others = {name: FOLDED[name] for name in FOLDED if num_groups > 1 or name != "folded"}
    synchronize = partial(torch.cuda.synchronize, device)
    candidates = {USUAL: usual, **others}
    return measured_choice(candidates, heads, dtype, device, synchronize, is_replayed)
