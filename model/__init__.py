"""Train-free speculative decoding for any decoder-only Hugging Face model, unmodified."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.decoder import SpeculativeDecoder, TokenRecycling
    from .api.output import GenerateOutput, StreamPiece

__all__ = ["GenerateOutput", "SpeculativeDecoder", "StreamPiece", "TokenRecycling"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that commands that only read reports stay fast."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".api.decoder", __name__), name)
