"""Packages that are installed here, those that this library asks for, and its own name where it is installed.

A method of another package imports `token_recycling`. In a checkout, where the package is called `model`, it gets
the checkout's modules, not a second copy of each.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

NAME = "token-recycling"
PACKAGE = Path(__file__).resolve().parents[1]
# Packages that shape a result.
RECORDED = ("torch", "transformers", "tokenizers", "fschat", "numpy", "safetensors")


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    from importlib import metadata  # takes 20 ms, and not every program asks

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that shape a result."""
    found = {name: installed_version(name) or "not installed" for name in RECORDED}
    with suppress(ImportError):
        import torch

        # Its metadata may lack the build's suffix, such as +cu128.
        found["torch"] = str(torch.__version__)
    return {"python": platform.python_version(), **found}


def requirements() -> dict[str, list[Requirement]]:
    """Return what the library asks for, by its extras; "" is what it always needs."""
    from packaging.requirements import Requirement

    if PACKAGE.name == "model":  # a checkout, which need not be what is installed
        if sys.version_info < (3, 11):
            raise LookupError("Python 3.10 does not read pyproject.toml")
        import tomllib

        content = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(content)["project"]
        lines = {"": project["dependencies"], **project["optional-dependencies"]}
        return {extra: [Requirement(line) for line in given] for extra, given in lines.items()}
    from importlib import metadata

    found: dict[str, list[Requirement]] = {"": []}
    for line in metadata.requires(NAME) or ():
        requirement = Requirement(line)
        marker = str(requirement.marker or "")
        found.setdefault(marker.partition('extra == "')[2].rstrip('"'), []).append(requirement)
    return found


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
