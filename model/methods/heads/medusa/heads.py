"""Medusa's heads, and their published checkpoints.

A checkpoint is a folder with `config.json` and `medusa_lm_head.pt`, as FasterDecoding's, or
`medusa_lm_head.safetensors` with the same names: `i.j.linear.weight` and `.bias` for block j of head i,
and `i.J.weight` for its output layer, J blocks a head. Heads without output layers use the target
model's.

Shapes: K heads, D hidden size, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ..head_files import HeadFiles, read_heads, write_heads
from ..residual_heads import ResidualBlock

FILE = "medusa_lm_head"


class MedusaShape(NamedTuple):
    """The shape of a checkpoint."""

    num_heads: int  # K
    num_layers: int  # residual blocks of a head, J
    hidden_size: int  # D
    vocab_size: int | None  # V; None if the heads use the target model's output head


class MedusaHeads(nn.ModuleList):
    """K heads, each of J residual blocks and an output layer."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        self.shape = shape
        for _ in range(shape.num_heads):
            layers: list[nn.Module] = [
                ResidualBlock(shape.hidden_size) for _ in range(shape.num_layers)
            ]
            if shape.vocab_size is not None:
                layers.append(nn.Linear(shape.hidden_size, shape.vocab_size, bias=False))
            self.append(nn.Sequential(*layers))


def write_medusa(folder: Path, heads: MedusaHeads, model_name: str) -> None:
    """Write a checkpoint, in the dtype of the heads."""
    shape = heads.shape
    config = {
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "base_model_name_or_path": model_name,
    }
    write_heads(folder, FILE, config, heads.state_dict())


def read_medusa(folder: str) -> tuple[HeadFiles, MedusaShape]:
    """Read a checkpoint's config and names, and check every tensor.

    Raises:
        ValueError: if a file is missing or unreadable, or a tensor is missing, extra or wrongly shaped.
    """
    files = read_heads(Path(folder), FILE, "medusa")
    num_layers = files.number("medusa_num_layers")
    size = files.size_of("0.0.linear.weight", 1)
    # The config of FasterDecoding/medusa-vicuna-7b-v1.3 says 2 heads, and its file has 5.
    num_heads = 1 + max(int(name.partition(".")[0]) for name in files.tensors if name[0].isdigit())
    output = f"0.{num_layers}.weight"
    vocab_size = files.size_of(output, 0) if output in files.tensors else None
    shape = MedusaShape(num_heads, num_layers, size, vocab_size)
    with torch.device("meta"):
        files.check(MedusaHeads(shape).state_dict())
    return files, shape
