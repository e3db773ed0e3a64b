"""A method's memory (the matrix of recycling) in a safetensors file, and a drafter that begins with it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from evaluation.command_line import UserError, first_line
from model.drafter import Drafter, drafter_class


def make_drafter(
    method: str,
    config: Any,
    vocab_size: int,
    device: torch.device,
    memory: Mapping[str, torch.Tensor],
) -> Drafter:
    """Make the drafter, with a saved matrix if one was given."""
    try:
        drafter = drafter_class(method)(config, vocab_size, device)
        if memory:
            drafter.load_memory(memory)
    except ValueError as error:
        raise UserError(str(error)) from error
    if memory and drafter.is_cold:
        raise UserError(
            "load_matrix: got a matrix with --start cold, which forgets it before the first question; leave one out"
        )
    return drafter


def read_memory(file: str | None) -> dict[str, torch.Tensor]:
    """Read a saved matrix; {} if none was asked for."""
    if not file:
        return {}
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"load_matrix {file}: is not a readable safetensors file: {first_line(error)}"
        ) from error


def check_folder_of(file: str | None) -> None:
    """Refuse a file that could not be written when the run is over."""
    if not file:
        return
    folder = Path(file).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise UserError(
            f"save_matrix: got {file}; allowed: a file in a folder that is there and can be written"
        )


def save_memory(drafter: Drafter, file: Path) -> None:
    """Save what the drafter keeps across prompts; a reader sees the whole file or none."""
    temporary = file.with_name(file.name + ".tmp")
    save_file(
        drafter.memory(),
        temporary,
        metadata={"config": json.dumps(dataclasses.asdict(drafter.config))},
    )
    os.replace(temporary, file)
