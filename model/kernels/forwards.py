"""Exchanges the forward passes of modules within a block; the model is unchanged outside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def exchanged_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within the block these modules compute with these functions."""
    # Bypasses `nn.Module.__setattr__`, which takes longer than a small layer.
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]
