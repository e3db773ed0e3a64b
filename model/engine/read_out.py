"""Read-out: everything the host needs of a pass, copied in one transfer, and which logits are near-ties.

Floating-point sums depend on the shape of a pass, so that two logits that differ by rounding alone may
change places between a tree and a single token: a near-tie.

Logit samples are the logits of a few tokens spread evenly over the vocabulary. Logits are linear in
the last hidden state, so close states have close samples, and every model gives logits.

Drafters get logits in sixteenths, the steps that bfloat16 itself has from 8 to 16: what they weigh needs no more,
and a recording of it is small (`evaluation.record`). Verification decides by the logits as they are.

Shapes: N nodes, V vocabulary, k candidates, S logit samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..kernels.linear import is_exact
from ..kernels.operations import top_k
from ..machine.hardware import downloaded
from .tree import DraftTree

# Candidates read in measurements of a pass.
USUAL_CANDIDATES = 8
# Tokens whose logits are sampled; a smaller vocabulary is used whole.
NUM_LOGIT_SAMPLES = 64
# Drafters get logits rounded to 1 / LOGIT_STEPS.
LOGIT_STEPS = 16

# Two logits closer than this many rounding steps of the larger may change places with the shape of
# a forward pass; the noise measured on the demo model in float32 is 6 such steps.
TIE_STEPS = 256
# Floor on |logit| for the margin: rounding grows with the terms of the dot product, not with their sum,
# which may be near 0. The margin leaves room for sums some forty times as large.
LEAST_SIZE = 1.0


class Candidates(NamedTuple):
    """The likeliest next tokens after every node, on the host.

    Lists, not arrays: a pass evicts everything from the processor's caches, so that a call into a
    library takes longer than a loop over the numbers of a usual draft.
    """

    token_ids: list[list[int]]  # k for each of N nodes, the likeliest first
    logits: list[list[float]]  # of these tokens, `rounded`


class ReadOut(NamedTuple):
    """The part of a pass that the host reads, of every node."""

    node_tokens: list[int]  # [N]
    candidates: Candidates
    logit_samples: torch.Tensor | None  # float32 [N, S]; None if they are not wanted
    gaps: list[float]  # of the two largest logits, not rounded [N]; infinite if only one was read


# A function such as `read_out`, with all its arguments.
Reader = Callable[[DraftTree, torch.Tensor, int, bool], ReadOut]


def read_out(
    tree: DraftTree, logits: torch.Tensor, num_candidates: int, with_samples: bool = False
) -> ReadOut:
    """Copy a tree's tokens, k candidates and, if wanted, logit samples to the host in one transfer.

    Of equal logits the first wins for k = 1, else any of them.
    """
    if logits.device.type != "cpu":
        tokens = None if tree.token_ids.device.type == "cpu" else tree.token_ids
        joined = joined_read_out(logits, num_candidates, with_samples, tokens)
        count = min(num_candidates, logits.shape[-1])
        return split_read_out(tree, downloaded(joined), count, tokens is not None)
    values, token_ids = _likeliest(logits, num_candidates)
    logit_samples = logit_samples_of(logits) if with_samples else None
    found = Candidates(token_ids.tolist(), rounded(values).tolist())
    return ReadOut(tree.token_ids.tolist(), found, logit_samples, _gaps(values).tolist())


def joined_read_out(
    logits: torch.Tensor,
    num_candidates: int,
    with_samples: bool = False,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the input of `split_read_out`, on the device of the logits [N, V], as one int32 tensor with a row a
    node.

    Columns: candidates [N, k], their logits [N, k], logit samples [N, S] if wanted, and the nodes' tokens [N]
    if they are given.
    """
    values, candidates = _likeliest(logits, num_candidates)
    numbers = values.float()
    if with_samples:
        numbers = torch.cat((numbers, logit_samples_of(logits)), dim=1)
    parts = [candidates.int(), numbers.view(torch.int32)]
    if token_ids is not None:
        parts.append(token_ids[:, None].int())
    return torch.cat(parts, dim=1)


def split_read_out(
    tree: DraftTree, joined: torch.Tensor, num_candidates: int, has_tokens: bool
) -> ReadOut:
    """Undo `joined_read_out` on the host; the rows of the tree's nodes are the first ones."""
    count, end = num_candidates, joined.shape[1] - has_tokens
    joined = joined[: tree.topology.num_nodes]
    tokens = joined[:, end] if has_tokens else tree.token_ids
    numbers = joined[:, count:end].view(torch.float32)
    values, samples = numbers[:, :count], numbers[:, count:]
    found = Candidates(joined[:, :count].tolist(), rounded(values).tolist())
    with_samples = samples.shape[1] > 0
    return ReadOut(
        tokens.tolist(), found, samples if with_samples else None, _gaps(values).tolist()
    )


def _likeliest(logits: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logits of every row and their columns, each [N, k]."""
    count = min(num_candidates, logits.shape[-1])
    if count == 1:
        values, token_ids = logits.max(dim=-1, keepdim=True)
        return values, token_ids
    return top_k(logits, count)


def _gaps(values: torch.Tensor) -> torch.Tensor:
    """Return the difference of the two largest logits of every row [N, k], [N]."""
    if values.shape[1] == 1:
        return torch.full_like(values[:, 0], math.inf)
    return values[:, 0] - values[:, 1]


def rounded(logits: torch.Tensor) -> torch.Tensor:
    """Return logits as drafters get them, float32 of the same shape."""
    return (logits.float() * LOGIT_STEPS).round_().div_(LOGIT_STEPS)


def likeliest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest logits of every row [N, V], `rounded`, and their tokens, each [N, k]."""
    values, token_ids = top_k(logits, k)
    return rounded(values), token_ids


def sampled_ids(vocab_size: int) -> range:
    """Return the S tokens whose logits are sampled."""
    count = min(NUM_LOGIT_SAMPLES, vocab_size)
    return range(0, vocab_size // count * count, vocab_size // count)


def logit_samples_of(logits: torch.Tensor) -> torch.Tensor:
    """Return the logit samples of logits [N, V], float32 [N, S]; those of recorded logits are their `samples`."""
    if (recorded := getattr(logits, "samples", None)) is not None:
        found: torch.Tensor = recorded
        return found
    ids = sampled_ids(logits.shape[-1])
    return logits[:, ids.start : ids.stop : ids.step].float()


def tie_margin(dtype: torch.dtype) -> float:
    """Return the relative difference of logits below which their order is decided by plain decoding; 0:
    never, as in half precision.
    """
    # float32 also for float64: verification compares the logits in float32.
    return TIE_STEPS * torch.finfo(torch.float32).eps if is_exact(dtype) else 0.0


def tie_gap(largest: float, margin: float) -> float:
    """Return the difference from the largest logit below which rounding could exchange two."""
    return margin * max(abs(largest), LEAST_SIZE)


def tie_gaps(largest: torch.Tensor, margin: float) -> torch.Tensor:
    """Return the `tie_gap` of each of the largest logits [N]."""
    return margin * largest.abs().clamp(min=LEAST_SIZE)
