"""The table of methods.

To add one, write a folder with a `drafter.py` (a config dataclass and a `Drafter`) and a line here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from ..engine.drafter import Drafter
from ..options import unknown_name

# Module and class of each method's drafter, relative to this package.
METHODS: dict[str, str] = {
    "vanilla": ".vanilla.drafter:VanillaDrafter",
    "recycling": ".recycling.drafter:RecyclingDrafter",
    "pld": ".pld.drafter:PldDrafter",
    "lookahead": ".lookahead.drafter:LookaheadDrafter",
    "samd": ".samd.drafter:SamdDrafter",
    "suffix": ".suffix.drafter:SuffixDrafter",
    "rest": ".rest.drafter:RestDrafter",
    "sps": ".sps.drafter:SpsDrafter",
    "racer": ".racer.drafter:RacerDrafter",
    "logitspec": ".logitspec.drafter:LogitSpecDrafter",
    "goose": ".goose.drafter:GooseDrafter",
    "medusa": ".medusa.drafter:MedusaDrafter",
    "hydra": ".hydra.drafter:HydraDrafter",
    "eagle": ".eagle.drafter:EagleDrafter",
    "eagle2": ".eagle.drafter:Eagle2Drafter",
    "eagle3": ".eagle.drafter:Eagle3Drafter",
    "hybrid": ".hybrid.drafter:HybridDrafter",
}


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the table, looked up once: commands carry it, not its name.

    Attributes:
        name: its name in `METHODS`.
        drafter_class: its drafter.
    """

    name: str
    drafter_class: type[Drafter]

    @property
    def config_class(self) -> type[Any]:
        """The dataclass of its options."""
        return self.drafter_class.config_class

    @property
    def heads_of(self) -> str:
        """The method for which heads are trained that this one can draft with."""
        return self.drafter_class.heads_of or self.name


def find_method(name: str) -> Method:
    """Return the method of a name.

    Raises:
        ValueError: if it is unknown; names the known ones.
    """
    if name not in METHODS:
        raise ValueError(unknown_name("method", name, list(METHODS)))
    module, class_name = METHODS[name].split(":")
    return Method(name, getattr(importlib.import_module(module, __package__), class_name))


def drafter_class(method: str) -> type[Drafter]:
    """Return the drafter of a method.

    Raises:
        ValueError: if the method is unknown.
    """
    return find_method(method).drafter_class
