"""Checks of a method's memory: its rows, and the tensors that it is loaded from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def check_tensor(
    what: str, tensor: torch.Tensor, dtype: object, shape: Sequence[int], hint: str = ""
) -> None:
    """Raise ValueError if a saved tensor has not this dtype, torch's or numpy's, and shape; `what` begins it."""
    is_of_dtype = str(tensor.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")
    if not is_of_dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{what} {tensor.dtype} of shape {list(tensor.shape)}; allowed: {dtype} of shape {list(shape)}{hint}"
        )


def check_ids(ids: torch.Tensor, vocab_size: int) -> None:
    """Raise ValueError if a saved tensor holds a token outside the vocabulary."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"matrix: holds ids outside the vocabulary 0 to {vocab_size - 1}")


def check_names(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], hint: str = ""
) -> None:
    """Raise ValueError if a file holds other tensors than a method's memory; the hint ends its text."""
    if set(found) != set(wanted):
        names = sorted(found)
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ValueError(
            f"matrix: got tensors {shown or 'none'}; allowed: {', '.join(wanted)}{hint}"
        )
