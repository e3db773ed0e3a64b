"""The table of methods: those of this package, and those that other packages bring.

A method of this package is a folder with a `drafter.py` (a config dataclass and a `Drafter`) and a
line in `BUILT_IN`. Another package names its methods in its entry points, group
`token_recycling.methods`. Any other drafter is named by its class: "package.module:DrafterClass".
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NewType

from ..machine.packages import answer_to_installed_name
from ..options import Words, unknown_name

if TYPE_CHECKING:  # it imports torch, which reports do without
    from ..engine.drafter import Drafter

ENTRY_POINTS = "token_recycling.methods"
# Module and class of each method's drafter, relative to this package.
BUILT_IN: dict[str, str] = {
    "vanilla": ".vanilla.drafter:VanillaDrafter",
    "recycling": ".recycling.drafter:RecyclingDrafter",
    "recycling-averaged": ".recycling.drafter:AveragedRecyclingDrafter",
    "pld": ".pld.drafter:PldDrafter",
    "toolspec": ".pld.toolspec:ToolSpecDrafter",
    "adapld": ".pld.adapld:AdaPldDrafter",
    "lookahead": ".lookahead.drafter:LookaheadDrafter",
    "samd": ".samd.drafter:SamdDrafter",
    "suffix": ".suffix.drafter:SuffixDrafter",
    "rest": ".rest.drafter:RestDrafter",
    "sssd": ".rest.sssd:SssdDrafter",
    "sps": ".sps.drafter:SpsDrafter",
    "racer": ".racer.drafter:RacerDrafter",
    "logitspec": ".logitspec.drafter:LogitSpecDrafter",
    "goose": ".goose.drafter:GooseDrafter",
    "cacheback": ".cacheback.drafter:CachebackDrafter",
    "esp": ".esp.drafter:EspDrafter",
    "stand": ".stand.drafter:StandDrafter",
    "medusa": ".heads.medusa.drafter:MedusaDrafter",
    "hydra": ".heads.hydra.drafter:HydraDrafter",
    "eagle": ".heads.eagle.drafter:EagleDrafter",
    "eagle2": ".heads.eagle.drafter:Eagle2Drafter",
    "eagle3": ".heads.eagle.drafter:Eagle3Drafter",
    "peagle": ".heads.eagle.parallel:PEagleDrafter",
    "dflash": ".heads.block.drafter:DFlashDrafter",
    "hybrid": ".hybrid.drafter:HybridDrafter",
}


MethodName = Literal[
    "vanilla",
    "recycling",
    "recycling-averaged",
    "pld",
    "toolspec",
    "adapld",
    "lookahead",
    "samd",
    "suffix",
    "rest",
    "sssd",
    "sps",
    "racer",
    "logitspec",
    "goose",
    "cacheback",
    "esp",
    "stand",
    "medusa",
    "hydra",
    "eagle",
    "eagle2",
    "eagle3",
    "peagle",
    "dflash",
    "hybrid",
]  # of `BUILT_IN`, for editors
# A method of another package, by its name there or as "package.module:DrafterClass". A plain text works as well;
# with this type, a type checker sees a wrong name.
CustomMethod = NewType("CustomMethod", str)


class _Methods(Mapping[str, str]):
    """Module and class of every method; entry points are read when they are asked for."""

    def __getitem__(self, name: str) -> str:
        return BUILT_IN.get(name) or _other_packages()[name]

    def __iter__(self) -> Iterator[str]:
        yield from BUILT_IN
        yield from _other_packages()

    def __len__(self) -> int:
        return len(BUILT_IN) + len(_other_packages())


METHODS: Mapping[str, str] = _Methods()


@dataclass(frozen=True, slots=True)
class Method:
    """A method, looked up once: commands carry it, not its name."""

    name: str  # its name in `METHODS`, or its drafter's module and class
    drafter_class: type[Drafter]  # its drafter

    @property
    def config_class(self) -> type[Any]:
        return self.drafter_class.config_class

    @property
    def heads_of(self) -> str:
        """The method for which heads are trained that this one can draft with."""
        heads_of: str = getattr(self.drafter_class, "heads_of", "")
        return heads_of or self.name


def find_method(name: str) -> Method:
    """Return the method of a name, or of a drafter's "package.module:DrafterClass".

    Raises:
        ValueError: if it is unknown, naming the known ones; if the module cannot be imported, or has no
            such drafter; if an entry point takes the name of another method.
    """
    if ":" not in name and name not in METHODS:
        raise ValueError(unknown_name("method", name, list(METHODS)))
    module_name, _, class_name = (name if ":" in name else METHODS[name]).partition(":")
    module = _module_of(name, module_name)
    if name not in BUILT_IN:
        _check_drafter(name, module, class_name)
    return Method(name, getattr(module, class_name))


def drafter_class(method: str) -> type[Drafter]:
    """Return the drafter of a method; errors as of `find_method`."""
    return find_method(method).drafter_class


def words_of(name: str) -> Words:
    """Return the words of a method, from the package of its drafter's module; its name if there are none.

    Of a drafter's "package.module:DrafterClass" they are those of the class, in a package that was imported: a file
    of answers may name any module, and reading it imports none.
    """
    module_name, _, key = name.rpartition(":")
    try:
        if module_name:
            package = sys.modules.get(module_name.rpartition(".")[0] or module_name)
        else:
            module_name = METHODS[name].partition(":")[0]
            package = _module_of(name, module_name.rpartition(".")[0] or module_name)
    except (KeyError, ValueError):  # a method that is not installed, or a wrong entry point
        return Words(name)
    table = getattr(package, "WORDS", None)  # of another package: it may be anything
    words = table.get(key) if isinstance(table, Mapping) else None
    return words if isinstance(words, Words) else Words(name)


@cache
def _other_packages() -> dict[str, str]:
    """Return module and class of the methods of other packages, by name.

    Raises:
        ValueError: if two methods have one name.
    """
    from importlib.metadata import entry_points  # slow; most names are in `BUILT_IN`

    found: dict[str, str] = {}
    for point in entry_points(group=ENTRY_POINTS):
        if point.name in (BUILT_IN | found):
            package = point.dist.name if point.dist else point.value
            raise ValueError(
                f"method: got {point.name!r} from the package {package}; allowed: a name that no other "
                f"method has; rename it in the package's entry points {ENTRY_POINTS}"
            )
        found[point.name] = f"{point.module}:{point.attr}"
    return found


def _module_of(name: str, module_name: str) -> ModuleType:
    if name in BUILT_IN:
        return importlib.import_module(module_name, __package__)
    answer_to_installed_name()
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # another package's code may raise anything
        raise ValueError(
            f"method: got {name!r}, but the module {module_name!r} cannot be imported "
            f"({type(error).__name__}: {error}); allowed: package.module:DrafterClass of an installed package"
        ) from error


def _check_drafter(name: str, module: ModuleType, class_name: str) -> None:
    from ..engine.drafter import Drafter

    found = getattr(module, class_name, None)
    if found is None:
        raise ValueError(
            f"method: got {name!r}, but {module.__name__} has no {class_name!r}; "
            "allowed: package.module:DrafterClass"
        )
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise ValueError(
            f"method: got {name!r}, which is not a Drafter; allowed: a subclass of "
            "token_recycling.engine.drafter.Drafter"
        )
    if not hasattr(found, "config_class"):
        raise ValueError(
            f"method: got {name!r}, whose class has no config_class; give it its options' dataclass"
        )
