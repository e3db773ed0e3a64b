"""A method's memory (the matrix of recycling) in a safetensors file, for the tokens of one vocabulary."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..engine.drafter import Drafter
from ..machine.files import atomic_write, refuse_lfs_pointer

VOCABULARY = "vocabulary_sha256"


def save_memory(drafter: Drafter, file: Path, tokenizer: Any = None) -> None:
    """Save what the drafter keeps across prompts; a reader sees the whole file or none.

    Its metadata hold the method's options, for people, and a hash of the tokenizer's vocabulary.

    Raises:
        ValueError: if the method keeps nothing, with its options.
        OSError: if the file cannot be written.
    """
    memory = drafter.memory()
    if not memory:
        raise ValueError("save_matrix: this method keeps nothing across prompts")
    metadata = {"config": json.dumps(dataclasses.asdict(drafter.config))}
    if tokenizer is not None:
        metadata[VOCABULARY] = vocabulary_hash(tokenizer)
    with atomic_write(file) as temporary:
        save_file(memory, temporary, metadata=metadata)


def read_memory(file: str | Path, tokenizer: Any = None) -> dict[str, torch.Tensor]:
    """Read what `save_memory` wrote.

    Raises:
        ValueError: if it was learned with another vocabulary, where both are known, or is a pointer of Git LFS.
        OSError, SafetensorError: if the file cannot be read.
    """
    refuse_lfs_pointer(file, f"load_matrix {file}")
    with safe_open(file, framework="pt") as content:
        known = (content.metadata() or {}).get(VOCABULARY)
        if known and tokenizer is not None and known != vocabulary_hash(tokenizer):
            raise ValueError(
                f"load_matrix {file}: was learned with another tokenizer, whose token ids mean other texts; "
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
