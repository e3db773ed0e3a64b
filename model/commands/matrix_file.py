"""A method's memory (such as recycling's matrix) in a safetensors file, and drafters that begin with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..api import saved_memory
from ..budget import memory as rows
from ..engine.drafter import Drafter
from ..methods import Method
from .command_line import UserError, first_line, user_errors
from .files import check_file

# Rows, and as much again for what else a method keeps.
MAX_BYTES = 2 * rows.MAX_BYTES


def make_drafter(
    method: Method,
    config: Any,
    vocab_size: int,
    device: torch.device,
    memory: Mapping[str, torch.Tensor],
) -> Drafter:
    """Make the drafter and load the saved matrix, if one was given."""
    with user_errors():
        drafter = method.drafter_class(config, vocab_size, device)
        if memory:
            drafter.load_memory(memory)
    if memory and drafter.needs.cold_start:
        raise UserError(
            "load_matrix: got a matrix with --start cold, which forgets it before the first question; leave one out"
        )
    return drafter


def read_memory(file: str | None, tokenizer: Any = None) -> dict[str, torch.Tensor]:
    """Read a saved matrix for the tokens of a tokenizer; {} if no file was given."""
    if not file:
        return {}
    check_file(Path(file), "load_matrix", MAX_BYTES)
    try:
        return saved_memory.read_memory(file, tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from error
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"load_matrix {file}: is not a readable safetensors file: {first_line(error)}"
        ) from error


def write_memory(drafter: Drafter, file: Path, tokenizer: Any = None) -> None:
    """Save what the drafter keeps across prompts; a reader sees the whole file or none.

    Raises:
        UserError: if the file cannot be written.
    """
    try:
        saved_memory.save_memory(drafter, file, tokenizer)
    except (OSError, SafetensorError) as error:
        raise UserError(f"save_matrix {file}: cannot be written: {first_line(error)}") from error
