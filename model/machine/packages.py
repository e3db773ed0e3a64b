"""Packages that are installed here, and those that this library asks for."""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

NAME = "token-recycling"
PACKAGE = Path(__file__).resolve().parents[1]
# Packages that shape a result.
RECORDED = ("torch", "transformers", "tokenizers", "fschat", "numpy", "safetensors")


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
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
    """Return what the library asks for, by its extras; "" is what it always needs.

    Raises:
        LookupError: in a checkout under Python 3.10, which does not read the TOML file where it stands.
    """
    if PACKAGE.name == "model":  # a checkout, which need not be what is installed
        return _of_checkout(PACKAGE.parent / "pyproject.toml")
    found: dict[str, list[Requirement]] = {"": []}
    for line in metadata.requires(NAME) or ():
        requirement = Requirement(line)
        marker = str(requirement.marker or "")
        found.setdefault(marker.partition('extra == "')[2].rstrip('"'), []).append(requirement)
    return found


def _of_checkout(file: Path) -> dict[str, list[Requirement]]:
    if sys.version_info < (3, 11):
        raise LookupError("Python 3.10 does not read pyproject.toml")
    import tomllib

    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    lines = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(line) for line in given] for extra, given in lines.items()}
