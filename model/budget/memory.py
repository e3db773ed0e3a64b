"""A method's memory, such as the matrix of recycling: checks of its rows and tensors, and its safetensors file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..engine.drafter import Drafter
from ..machine.files import atomic_write, refuse_lfs_pointer

# A table of rows is written to disk after every answer of a run.
MAX_BYTES = 2**30
VOCABULARY = "vocabulary_sha256"


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
    """Raise ValueError if a file holds other tensors than a method's memory; the hint ends its message."""
    if set(found) != set(wanted):
        names = sorted(found)
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ValueError(
            f"matrix: got tensors {shown or 'none'}; allowed: {', '.join(wanted)}{hint}"
        )


def save_memory(drafter: Drafter, file: Path, tokenizer: Any = None) -> None:
    """Save what the drafter keeps across prompts, or raise ValueError; a reader sees the whole file or none.

    Its metadata hold the method's options, for people, and a hash of the tokenizer's vocabulary.
    """
    memory = drafter.memory()
    if not memory:
        raise ValueError(
            "memory: this method keeps nothing across prompts, so there is nothing to save"
        )
    metadata = {"config": json.dumps(dataclasses.asdict(drafter.config))}
    if tokenizer is not None:
        metadata[VOCABULARY] = vocabulary_hash(tokenizer)
    with atomic_write(file) as temporary:
        save_file(memory, temporary, metadata=metadata)


def read_memory(file: str | Path, tokenizer: Any = None) -> dict[str, torch.Tensor]:
    """Read what `save_memory` wrote; ValueError if it was learned with another vocabulary, where both are known."""
    refuse_lfs_pointer(file, f"memory {file}")
    with safe_open(file, framework="pt") as content:
        known = (content.metadata() or {}).get(VOCABULARY)
        if known and tokenizer is not None and known != vocabulary_hash(tokenizer):
            raise ValueError(
                f"memory {file}: was learned with another tokenizer, whose token ids mean other texts; "
                "allowed: memory of models with the same vocabulary"
            )
        return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118


def vocabulary_hash(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's tokens and their ids.

    Tokens that were added are left out: models with the same vocabulary often have other special tokens.
    """
    added = tokenizer.get_added_vocab()
    tokens = sorted((id_, text) for text, id_ in tokenizer.get_vocab().items() if text not in added)
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
