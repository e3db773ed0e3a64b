"""Saved memory that does not fit."""

from __future__ import annotations

import torch


def misfits(memory: dict[str, torch.Tensor], name: str) -> list[dict[str, torch.Tensor]]:
    """Return a memory with one tensor too short, of another type, and a scalar."""
    good = memory[name]
    wrong = (good[:-1], good.to(torch.float32), good.sum().to(good.dtype))
    return [{**memory, name: tensor} for tensor in wrong]
