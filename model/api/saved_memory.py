"""A method's memory (the matrix of recycling) in a safetensors file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from ..engine.drafter import Drafter
from ..machine.files import atomic_write, refuse_lfs_pointer


def save_memory(drafter: Drafter, file: Path) -> None:
    """Save what the drafter keeps across prompts; a reader sees the whole file or none.

    Its metadata hold the method's options, for people; nothing reads them.

    Raises:
        ValueError: if the method keeps nothing, with its options.
        OSError: if the file cannot be written.
    """
    memory = drafter.memory()
    if not memory:
        raise ValueError("save_matrix: this method keeps nothing across prompts")
    options = json.dumps(dataclasses.asdict(drafter.config))
    with atomic_write(file) as temporary:
        save_file(memory, temporary, metadata={"config": options})


def load_memory(drafter: Drafter, file: Path) -> None:
    """Load what `save_memory` wrote for an equally configured drafter of the same vocabulary.

    Raises:
        ValueError: if it does not fit the drafter, or is a pointer of Git LFS.
        OSError, SafetensorError: if the file cannot be read.
    """
    refuse_lfs_pointer(file, f"matrix {file}")
    drafter.load_memory(load_file(file))
