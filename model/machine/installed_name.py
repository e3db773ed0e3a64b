"""The installed name of this package, `token_recycling`, for code that imports it in a checkout.

A method of another package imports `token_recycling`. In a checkout, where the package is called
`model`, it gets the checkout's modules, not a second copy of each.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

INSTALLED = "token_recycling"
HERE = __name__.partition(".")[0]


class _Alias(MetaPathFinder, Loader):
    """Finds a module of `token_recycling` as the module of this package that it is."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] == INSTALLED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(HERE + spec.name.removeprefix(INSTALLED))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None  # the alias's, which the import has just set
        module.__spec__ = module.__spec__.loader_state


def answer_to_installed_name() -> None:
    """Let imports of `token_recycling` give the modules of this package, if it has another name."""
    if HERE != INSTALLED and INSTALLED not in sys.modules:
        sys.meta_path.insert(0, _Alias())
        importlib.import_module(INSTALLED)
