"""Probes: the logits of a few tokens, spread evenly over the vocabulary, as an image of the model's state.

Logits are linear in the last hidden state, so that those of a few dozen tokens are a projection of it, and
states that are close have probes that are close. Every model gives logits; nothing else need be asked of it.

Shapes: N nodes, V vocabulary, S probes.
"""

from __future__ import annotations

import torch

# Of a larger vocabulary; of a smaller one all tokens are probes.
MOST_PROBES = 64


def probe_ids(vocab_size: int) -> range:
    """Return the tokens whose logits are probes: S of them."""
    count = min(MOST_PROBES, vocab_size)
    return range(0, vocab_size // count * count, vocab_size // count)


def probed(logits: torch.Tensor) -> torch.Tensor:
    """Return the probes of logits [N, V], in float32 [N, S]."""
    ids = probe_ids(logits.shape[-1])
    return logits[:, ids.start : ids.stop : ids.step].float()
