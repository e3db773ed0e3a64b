"""Attention of a few queries with the heads of a group folded into rows: the cache is not repeated.

Where a model's query heads share heads of keys, and there is a mask, transformers on CUDA first copies
keys and values for every query head, in every layer. Here the queries of all heads that share keys
are the rows of one matrix instead. There are two ways to attend then; measurements choose one for each
GPU (`model.kernels.choice`):

- `folded_sdpa`: torch's attention. Four launches and no copy of the cache; transformers' way has three,
  two of which copy the cache.
- `folded_products`: two batched products around a softmax. Seven launches in half precision, five
  without groups. Torch's kernel with a mask gives one block all keys of some queries, so after a long
  text few blocks work; products share the keys among blocks.

Both keep scores in float32. If scores were rounded to the model's dtype, as in transformers' eager
attention, the products would be five times as far off as torch's attention (81 queries, 593 keys,
bfloat16: 8.7e-3 from float64 instead of 2.3e-3, and 1.7e-3 with torch's), and drafted texts would
differ from plain decoding more often.

Shapes: n queries in each of H heads, T keys and values in each of K heads, G = H / K heads of queries
that share keys; D and E numbers in a key and a value. B texts, one but for batches.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

# Torch's kernel copies a mask whose rows do not begin at multiples of this many numbers.
MASK_ALIGNMENT = 16


def can_fold(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> bool:
    """Whether the shapes and dtypes are those of `folded_sdpa` and, for one text, `folded_products`."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    return (
        len(query) == len(key)
        and mask.shape == (len(query), 1, num_queries, num_keys)
        and mask.dtype in (torch.bool, query.dtype)
        and query.dtype == key.dtype == value.dtype
        and query.shape[1] % key.shape[1] == 0
    )


def folded_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend by torch's kernel over folded heads.

    Args:
        query: [B, H, n, D].
        key: [B, K, T, D].
        value: [B, K, T, E].
        mask: boolean (True: seen) or additive, [B, 1, n, T].
        scale: factor of the scores.

    Returns:
        The attended values [B, n, H, E].
    """
    num_texts, num_heads, num_queries, _ = query.shape
    num_keys, num_groups = key.shape[2], num_heads // key.shape[1]
    width = -(-num_keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
    rows = mask.new_empty(num_texts, num_groups, num_queries, width)[..., :num_keys]
    folded_mask = rows.copy_(mask).view(num_texts, 1, -1, num_keys)  # [B, 1, G n, T]
    folded = query.reshape(num_texts, key.shape[1], num_groups * num_queries, -1)
    attended = scaled_dot_product_attention(folded, key, value, folded_mask, scale=scale)
    heads = attended.reshape(num_texts, num_heads, num_queries, -1)
    return heads.transpose(1, 2).contiguous()


def folded_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend by two batched products over folded heads, of one text; arguments and result as of `folded_sdpa`."""
    num_heads, num_queries, num_keys = *query.shape[1:3], key.shape[2]
    scores = _products(_folded(query, key), key[0].transpose(1, 2))  # [K, G n, T]
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min)
    by_head = scores.view(num_heads, num_queries, num_keys)
    torch.add(mask[0], by_head, alpha=scale, out=by_head)
    weights = scores.softmax(dim=-1).to(query.dtype)
    if len(weights) < num_heads:
        return _unfolded(torch.bmm(weights, value[0]), num_queries)
    attended = query.new_empty(1, num_queries, num_heads, value.shape[-1])
    torch.bmm(weights, value[0], out=attended[0].transpose(0, 1))
    return attended


def _products(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return batched products, in float32 for factors in half precision."""
    if rows.dtype.itemsize >= 4:
        return torch.bmm(rows, columns)
    if rows.is_cuda:
        # The CPU has no such product.
        return torch.bmm(rows, columns, out_dtype=torch.float32)
    return torch.bmm(rows.float(), columns.float())


def _folded(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the queries of all heads that share keys as rows [K, G n, D]."""
    return query[0].reshape(key.shape[1], -1, query.shape[-1])


def _unfolded(rows: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Return rows [K, G n, E] as [1, n, H, E]."""
    heads = rows.reshape(-1, num_queries, rows.shape[-1])  # [H, n, E]
    return heads.transpose(0, 1).contiguous()[None]
