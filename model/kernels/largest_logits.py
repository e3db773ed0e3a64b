"""The k largest logits of every row, faster than `torch.topk` over a whole vocabulary.

Shapes: N rows, V vocabulary, k largest.
"""

from __future__ import annotations

import torch

from . import short_pass as few_rows

BLOCK = 128
# Below this many numbers one call of `torch.topk` is faster: each extra call costs 10 to 40 us
# besides its work, since a forward pass evicts its code from the caches (8 rows of 8,192: 80 us
# against 185).
SMALL = 2**17


# From this many columns on the kernel is faster.
WIDE = 2048


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest values of every row and their columns, in falling order.

    If `short_pass` is available, its kernel reads each wide row once. Otherwise the maxima of
    blocks of columns pick k blocks, which hold the k largest, since each number is at most the
    maximum of its block. A maximum reads memory once; selecting k of V costs several times that (81
    rows of 32,000: 0.5 ms against 1.5 ms on two cores).

    Args:
        logits: [N, V].
        k: at most V.

    Returns:
        Values [N, k], in the logits' dtype or float32, and int64 columns [N, k]; equal values come in any order.
    """
    is_for_kernel = (
        logits.shape[1] >= WIDE
        and logits.device.type == "cpu"
        and logits.dtype in few_rows.DTYPES
        and few_rows.is_available()
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
