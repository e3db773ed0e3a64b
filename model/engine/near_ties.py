"""Near-ties: pairs of logits whose order rounding could exchange.

Floating-point sums depend on the shape of a pass, so two logits that differ by rounding alone may
change places between a tree and a single token. In float32 the reference arithmetic, that of plain
decoding, decides such a pair (`reference_rows`), so that tokens are always equal, not almost
always.
"""

from __future__ import annotations

import torch

from ..kernels.linear import is_exact

# Two logits closer than this many rounding steps of the larger may change places with the shape of
# a forward pass; the noise measured on the demo model in float32 is 6 such steps.
TIE_STEPS = 256
# Floor on |logit| for the margin: rounding grows with the terms of the dot product, not with their sum,
# which may be near 0. The margin leaves room for sums some forty times as large.
LEAST_SIZE = 1.0


def tie_margin(dtype: torch.dtype) -> float:
    """Return the relative difference below which the reference decides; 0 (half precision): never."""
    # float32 also for float64: verification compares the logits in float32.
    return TIE_STEPS * torch.finfo(torch.float32).eps if is_exact(dtype) else 0.0


def tie_gap(largest: float, margin: float) -> float:
    """Return the difference from the largest logit below which rounding could swap two logits."""
    return margin * max(abs(largest), LEAST_SIZE)
