"""The table of methods.

To add one: a folder with a `drafter.py` (a config dataclass and a `Drafter`), and a line here.
"""

from __future__ import annotations

import importlib

from ..engine.drafter import Drafter, unknown_name

# Where the drafter of each method is, seen from this package.
METHODS: dict[str, str] = {
    "vanilla": ".vanilla.drafter:VanillaDrafter",
    "recycling": ".recycling.drafter:RecyclingDrafter",
    "pld": ".pld.drafter:PldDrafter",
    "lookahead": ".lookahead.drafter:LookaheadDrafter",
    "samd": ".samd.drafter:SamdDrafter",
    "sps": ".sps.drafter:SpsDrafter",
    "hybrid": ".hybrid.drafter:HybridDrafter",
}


def drafter_class(method: str) -> type[Drafter]:
    """Return the drafter of a method.

    Raises:
        ValueError: if the method is unknown.
    """
    if method not in METHODS:
        raise ValueError(unknown_name("method", method, list(METHODS)))
    module, name = METHODS[method].split(":")
    found: type[Drafter] = getattr(importlib.import_module(module, __package__), name)
    return found
