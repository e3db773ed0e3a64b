"""A method's memory (the matrix of recycling) in a safetensors file."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from safetensors.torch import load_file, save_file

from model.drafter import Drafter


def save_memory(drafter: Drafter, file: Path) -> None:
    """Save what the drafter keeps across prompts; a reader sees the whole file or none.

    Raises:
        ValueError: if the method keeps nothing.
        OSError: if the file cannot be written.
    """
    if not drafter.keeps_memory():
        raise ValueError("save_matrix: this method keeps nothing across prompts")
    temporary = file.with_name(file.name + ".tmp")
    save_file(
        drafter.memory(),
        temporary,
        metadata={"config": json.dumps(dataclasses.asdict(drafter.config))},
    )
    os.replace(temporary, file)


def load_memory(drafter: Drafter, file: Path) -> None:
    """Begin with what `save_memory` wrote for an equally configured drafter of the same vocabulary.

    Raises:
        ValueError: if it does not fit the drafter.
        OSError, SafetensorError: if the file cannot be read.
    """
    drafter.load_memory(load_file(file))
