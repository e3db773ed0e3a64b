"""The kernels of a pass over a few rows, as its layers and its read-out call them.

Shapes: N rows, V vocabulary, k largest; n queries in each of H heads, T keys.
"""

from __future__ import annotations

import torch
from torch import nn

from .short_pass import DTYPES, short_pass_kernel

# Most queries of a pass with a mask that the attention kernel is made for.
MOST_WITH_MASK = 128
BLOCK = 128
# Below this many numbers one call of `torch.topk` is faster: each extra call costs 10 to 40 us
# besides its work, since a forward pass evicts its code from the caches (8 rows of 8,192: 80 us
# against 185).
SMALL = 2**17
# From this many columns on the kernel is faster.
WIDE = 2048


def few_rows(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """Compute a layer by the kernel for a few rows; it must be available."""
    outputs: torch.Tensor = torch.ops.token_recycling.few_rows.default(
        rows, layer.weight, layer.bias
    )
    return outputs


def is_for_draft(mask: torch.Tensor | None, num_queries: int, num_keys: int) -> bool:
    """Whether the kernel attends with a mask: that of a draft; or without one from a single query."""
    if mask is None:
        return num_queries == 1
    return num_queries <= MOST_WITH_MASK and mask.shape == (1, 1, num_queries, num_keys)


def additive(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask, boolean (True: seen) or additive, as additive float32."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest values of every row [N, V], in falling order, and their columns, both [N, k].

    Values are in the logits' dtype or float32, columns int64; equal values come in any order.

    If there is one, our kernel reads each wide row once. Otherwise the maxima of blocks of columns pick k blocks,
    which hold the k largest, since each number is at most the maximum of its block. A maximum reads memory once;
    selecting k of V costs several times that (81 rows of 32,000: 0.5 ms against 1.5 ms on two cores).
    """
    is_for_kernel = (
        logits.shape[1] >= WIDE
        and logits.device.type == "cpu"
        and logits.dtype in DTYPES
        and short_pass_kernel() is not None
    )
    if is_for_kernel:
        found: tuple[torch.Tensor, torch.Tensor] = torch.ops.token_recycling.largest.default(
            logits, k
        )
        return found
    width = logits.shape[1]
    blocked = width // BLOCK * BLOCK
    if logits.numel() < SMALL or blocked < k * BLOCK:
        return torch.topk(logits, k, dim=-1)
    blocks = logits[:, :blocked].unflatten(1, (-1, BLOCK))  # [N, blocks, BLOCK]
    chosen = blocks.amax(dim=-1).topk(k, dim=-1, sorted=False).indices  # [N, k]
    pool = blocks.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).flatten(1)  # [N, k * BLOCK]
    pool = torch.cat((pool, logits[:, blocked:]), dim=1) if blocked < width else pool
    values, places = pool.topk(k, dim=-1)
    slots = (places // BLOCK).clamp(max=k - 1)
    inside = chosen.gather(1, slots) * BLOCK + places % BLOCK
    behind = places - k * BLOCK + blocked  # columns after the last whole block
    return values, torch.where(places < k * BLOCK, inside, behind)
