"""Train-free speculative decoding for any decoder-only Hugging Face model, unmodified.

from model import SpeculativeDecoder  # installed: from token_recycling import SpeculativeDecoder

decoder = SpeculativeDecoder.from_pretrained("data/demo/model")
print(decoder.generate("USER: Who are you? ASSISTANT:").text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.accelerate import accelerate, accelerated, recycling, restore, speculative
    from .api.decoder import SpeculativeDecoder, TokenRecycling
    from .api.output import GenerateOutput, StreamPiece
    from .engine.step import StepRecord
    from .methods import CustomMethod

__version__ = "0.2.0"
__all__ = [
    "CustomMethod",
    "GenerateOutput",
    "SpeculativeDecoder",
    "StepRecord",
    "StreamPiece",
    "TokenRecycling",
    "__version__",
    "accelerate",
    "accelerated",
    "recycling",
    "restore",
    "speculative",
]
# Where each name is from; it is imported at its first use, so that commands that only read reports stay fast.
_MODULES = {
    "CustomMethod": ".methods",
    "GenerateOutput": ".api.output",
    "SpeculativeDecoder": ".api.decoder",
    "StepRecord": ".engine.step",
    "StreamPiece": ".api.output",
    "TokenRecycling": ".api.decoder",
    "accelerate": ".api.accelerate",
    "accelerated": ".api.accelerate",
    "recycling": ".api.accelerate",
    "restore": ".api.accelerate",
    "speculative": ".api.accelerate",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    """Return the public names, those not imported yet included."""
    return __all__
