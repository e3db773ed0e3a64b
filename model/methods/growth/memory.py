"""Checks of a method's memory: its rows, and the tensors that it is loaded from."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# A table of rows is written to disk after every answer of a run.
MAX_BYTES = 2**30


def check_topk(k: int, vocab_size: int) -> None:
    """Raise ValueError if a row cannot hold as many different tokens, or a row for every token takes too much."""
    if k > vocab_size:
        raise ValueError(f"output_id_topk: got {k}; allowed: 1 to {vocab_size}, the vocabulary")
    check_size("output_id_topk", vocab_size, k)


def check_size(options: str, num_rows: int, k: int) -> None:
    """Raise ValueError, naming the options, if rows of k tokens, int32, take too much memory."""
    if 4 * num_rows * k > MAX_BYTES:
        raise ValueError(
            f"{options}: got {num_rows} rows of {k} tokens, {4 * num_rows * k / 2**30:.1f} GiB; "
            f"allowed: at most {MAX_BYTES >> 30} GiB; give less"
        )


def wrong_tensors(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str:
    """Return the text of an error for a file that holds other tensors than a method's memory."""
    names = sorted(found)
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"matrix: got tensors {shown or 'none'}; allowed: {', '.join(wanted)}"
