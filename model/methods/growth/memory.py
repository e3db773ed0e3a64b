"""Checks of a method's memory: its rows, and the tensors that it is loaded from."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def check_topk(k: int, vocab_size: int) -> None:
    """Raise ValueError if a row cannot hold as many different tokens."""
    if k > vocab_size:
        raise ValueError(f"output_id_topk: got {k}; allowed: 1 to {vocab_size}, the vocabulary")


def wrong_tensors(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str:
    """Return the text of an error for a file that holds other tensors than a method's memory."""
    names = sorted(found)
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"matrix: got tensors {shown or 'none'}; allowed: {', '.join(wanted)}"
