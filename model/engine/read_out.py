"""Read-out: everything the host needs of a pass, copied in one transfer.

A state sketch is the logits of a few tokens spread evenly over the vocabulary. Logits are linear in
the last hidden state, so close states have close sketches, and every model gives logits.

Shapes: N nodes, V vocabulary, k candidates, S sketches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.largest_logits import top_k
from .tree import DraftTree

# Tokens of a sketch; a smaller vocabulary is used whole.
SKETCH_SIZE = 64


class Candidates(NamedTuple):
    """The likeliest next tokens after every node, on the host.

    Lists, not arrays: a pass evicts everything from the processor's caches, so that a call into a
    library takes longer than a loop over the numbers of a usual draft.

    Attributes:
        token_ids: k for each of N nodes, the likeliest first.
        logits: of these tokens.
    """

    token_ids: list[list[int]]
    logits: list[list[float]]


def read_out(
    tree: DraftTree, logits: torch.Tensor, num_candidates: int, with_sketches: bool = False
) -> tuple[list[int], Candidates, torch.Tensor | None]:
    """Copy a tree's tokens [N], candidates and sketches to the host in one transfer.

    Args:
        tree: N nodes.
        logits: [N, V].
        num_candidates: k; for k = 1 the first of equal logits wins, else any of them.
        with_sketches: whether sketches are wanted.

    Returns:
        Tokens, candidates of N nodes, and their sketches, float32 [N, S], None if there are none.
    """
    count = min(num_candidates, logits.shape[-1])
    if count == 1:
        values, token_ids = logits.max(dim=-1, keepdim=True)  # [N, 1], [N, 1]
    else:
        values, token_ids = top_k(logits, count)  # [N, k], [N, k]
    sketches = state_sketch(logits) if with_sketches else None
    if logits.device.type == "cpu":  # nothing to transfer
        found = Candidates(token_ids.tolist(), values.tolist())
        return tree.token_ids.tolist(), found, sketches
    return _unpacked(_packed(tree, token_ids, values, sketches).cpu(), count)


def _packed(
    tree: DraftTree,
    token_ids: torch.Tensor,
    values: torch.Tensor,
    sketches: torch.Tensor | None,
) -> torch.Tensor:
    """Return tokens [N], candidates and their logits [N, k] and sketches [N, S] as one int32 tensor."""
    numbers = values.float() if sketches is None else torch.cat((values.float(), sketches), dim=1)
    tokens = tree.token_ids[:, None].int()
    return torch.cat((tokens, token_ids.int(), numbers.view(torch.int32)), dim=1)


def _unpacked(
    packed: torch.Tensor, num_candidates: int
) -> tuple[list[int], Candidates, torch.Tensor | None]:
    """Undo `_packed`: return tokens, candidates and sketches."""
    tokens, token_ids, bits = packed.tensor_split((1, 1 + num_candidates), dim=1)
    values, sketches = bits.view(torch.float32).tensor_split((num_candidates,), dim=1)
    found = Candidates(token_ids.tolist(), values.tolist())
    return tokens[:, 0].tolist(), found, sketches if sketches.shape[1] else None


def sketch_ids(vocab_size: int) -> range:
    """Return the S tokens whose logits make a sketch."""
    count = min(SKETCH_SIZE, vocab_size)
    return range(0, vocab_size // count * count, vocab_size // count)


def state_sketch(logits: torch.Tensor) -> torch.Tensor:
    """Return the state sketches of logits [N, V], float32 [N, S]."""
    ids = sketch_ids(logits.shape[-1])
    return logits[:, ids.start : ids.stop : ids.step].float()
