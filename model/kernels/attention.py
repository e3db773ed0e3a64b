"""The attention of a pass, by our own kernel where there is one.

On a CPU torch's kernel takes longer than our own (`short_pass`) for the queries of a draft and of a
prompt. Time of torch's / ours, heads of four models of 7M to 7B parameters in three dtypes, one
thread; drafts follow 512 tokens:

| queries | 1 | 8 | 32 | 128 | 512 | 2048 |
|---|---|---|---|---|---|---|
| Zen 5 | 1.9-36 | 1.4-14 | 1.2-4.4 | 1.4-10 | 2.7-11 | 1.8-2.9 |
| the same with AVX2 | 1.3-28 | 1.2-6.1 | 1.0-4.3 | 0.9-4.1 | 1.7-4.9 | 1.0-1.8 |

So ours is used for all. This is not measured on the machine: a choice measured while other work runs
stays wrong. It sums in another order: in float32 near-ties are decided with transformers' own
attention (`reference`), as with `model.kernels.linear`.

Where ours cannot be used, torch's is. When there is a mask, transformers' sdpa attention first repeats
keys and values for every query head of a group: a copy of the whole cache, times the group size, in
every layer. Torch's CPU kernel reads grouped heads as they are, with the same bits.

On a GPU grouped heads with a mask would fall back to matrix products in torch's kernel. The fastest
attention there for the rows of a draft depends on the device, so it is measured at a target's first pass
(`model.kernels.measured_attention`).

Shapes: n queries in each of H heads, T keys and values in each of K heads, D and E numbers in a key and a value.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .linear import FEWEST_WEIGHTS, is_exact, num_weights
from .measured_attention import (
    ROWS,
    Choice,
    LayerHeads,
    bucket,
    choice_on_gpu,
    first_letters,
    registered,
)
from .operations import MOST_WITH_MASK, is_for_draft
from .registered_attention import (
    PREFIX,
    USUAL,
    is_special,
    one_by_one,
    packed_name,
    register_attention,
    usual_attention,
)
from .short_pass import DTYPES, short_pass_kernel

GROUPED, FEW_QUERIES = "sdpa_grouped", "few_queries"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, n, D]
    key: torch.Tensor,  # [1, K, T, D]
    value: torch.Tensor,  # [1, K, T, E]
    attention_mask: torch.Tensor | None,  # boolean or additive, [1, 1, n, T]
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend like transformers' sdpa attention, bit for bit, without repeating heads.

    Arguments that are not supported lead to transformers' function, and no mask: without one it copies nothing.

    Returns:
        The attended values [1, n, H, E], and None for the weights.
    """
    is_grouped = key.shape[1] < query.shape[1]
    is_left_alone = query.shape[2] == 1  # transformers 5 itself groups its heads
    if attention_mask is None or is_left_alone or not is_grouped or is_special(kwargs):
        return usual_attention(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


def few_queries_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the kernel for a few queries; equal to `grouped_attention` up to rounding.

    Unsupported cases go to `grouped_attention`: queries that see later ones, masks that differ by
    head or cover more than a draft, dropout, special arguments.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_causal = attention_mask is None and num_queries > 1
    if is_causal:
        is_known = num_queries == num_keys and _is_decoder(module, kwargs)
    else:
        is_known = is_for_draft(attention_mask, num_queries, num_keys)
    if not is_known or dropout or key.dtype != query.dtype or is_special(kwargs):
        return grouped_attention(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended: torch.Tensor = torch.ops.token_recycling.attend.default(
        query, key, value, attention_mask, scale, is_causal
    )
    return attended, None


def few_queries_of_sequences(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, S, D]
    key: torch.Tensor,  # from `with_sequences`
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in each sequence as `few_queries_attention`, bit for bit, in one call; cases that the kernel does not
    support go there one by one. Arguments are as of `one_by_one`.
    """
    sizes, ends, keys, values, is_masked = key.of_sequences  # type: ignore[attr-defined]
    most = 1 if attention_mask is None else MOST_WITH_MASK
    is_by_head = attention_mask is not None and attention_mask.shape[1] > 1
    is_other = is_by_head or keys[0].dtype != query.dtype or is_special(kwargs)
    if max(sizes) > most or dropout or is_other:
        return one_by_one(
            FEW_QUERIES, module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended: torch.Tensor = torch.ops.token_recycling.attend_texts.default(
        query, keys, values, attention_mask, scale, sizes, ends, is_masked
    )
    return attended, None


def _is_decoder(module: torch.nn.Module, options: dict[str, Any]) -> bool:
    """Whether attention without a mask is causal, as transformers' sdpa attention decides it."""
    is_causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


register_attention(GROUPED, grouped_attention)
register_attention(FEW_QUERIES, few_queries_attention)
register_attention(PREFIX + FEW_QUERIES, few_queries_of_sequences)


class AttentionKernels:
    """The attention functions of a model's passes.

    Args:
        groups_heads: whether passes use `grouped_attention`.
        has_kernel: whether passes use `few_queries_attention`.
        choice: what was measured on a GPU.

    Attributes:
        name: name of the functions in use; for a choice, for each of `choice.ROWS` the first letters of
            the names for `choice.KEYS`.
    """

    def __init__(
        self,
        config: Any,
        groups_heads: bool,
        has_kernel: bool,
        is_plain: bool = False,
        choice: Choice = (),
    ) -> None:
        self.name = "few-queries" if has_kernel else USUAL
        self.is_plain = is_plain
        self._config = config
        self._groups_heads = groups_heads
        self._has_kernel = has_kernel
        self._by_rows = [registered(names) for names in choice]
        self._has_choice = any(self._by_rows)
        if self._has_choice:
            self.name = "-".join(("measured", *map(first_letters, choice)))

    def __bool__(self) -> bool:
        """Whether any pass uses an attention function that may round differently from transformers'."""
        return self._has_kernel or self._has_choice

    def function(self, num_rows: int, is_packed: bool = False, in_reference: bool = False) -> str:
        """Return the name of the function for a pass over `num_rows` rows, of several texts if it is packed.

        It is "" for the model's own.
        """
        is_on = self.is_plain or not in_reference
        name = GROUPED if self._groups_heads else ""
        if self._has_kernel and is_on:
            name = FEW_QUERIES
        elif self._has_choice and num_rows <= ROWS[-1] and is_on:
            name = self._by_rows[bucket(num_rows, ROWS)]
        return packed_name(name or self._config._attn_implementation) if is_packed else name

    @property
    def is_reference(self) -> bool:
        """Whether passes attend as plain decoding does, bit for bit."""
        return self.is_plain or not self


def can_exchange(model: PreTrainedModel) -> bool:
    """Whether the model accepts registered attention functions, and uses sdpa."""
    config = model.config.get_text_config(decoder=True)
    return (
        getattr(model, "_supports_attention_backend", False)
        and getattr(config, "_attn_implementation", None) == USUAL
    )


def attention_kernels(
    model: PreTrainedModel, heads: LayerHeads, is_replayed: bool = False
) -> AttentionKernels:
    """Return the attention of a model's passes on this machine."""
    config = model.config.get_text_config(decoder=True)
    is_plain = not is_exact(model.dtype)
    if can_exchange(model) and model.device.type == "cuda":
        choice = choice_on_gpu(heads, model.dtype, model.device, is_replayed)
        return AttentionKernels(config, False, False, is_plain, choice)
    if not can_exchange(model) or model.device.type != "cpu":
        return AttentionKernels(config, groups_heads=False, has_kernel=False)
    num_key_value_heads = getattr(config, "num_key_value_heads", None) or heads.num_heads
    groups_heads = heads.num_heads != num_key_value_heads
    return AttentionKernels(config, groups_heads, _has_kernel(model, heads), is_plain)


def _has_kernel(model: PreTrainedModel, heads: LayerHeads) -> bool:
    is_small = num_weights(model) < FEWEST_WEIGHTS
    if is_small or hasattr(model, "_orig_mod") or model.dtype not in DTYPES:
        return False
    return heads.num_heads % heads.num_key_heads == 0 and bool(short_pass_kernel())
