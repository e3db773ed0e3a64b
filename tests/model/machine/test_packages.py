"""What the library asks for: the same in a checkout as of the installed package.

Run: pytest tests/model/machine/test_packages.py
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from model.machine import packages

# As setuptools writes them.
LINES = ["torch<2.14,>=2.11", 'httpx<1,>=0.27; extra == "endpoint"', 'gguf<1; extra == "gguf"']


def test_requirements_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PACKAGE", Path("/site-packages/token_recycling"))
    monkeypatch.setattr(metadata, "requires", {packages.NAME: LINES}.get)
    found = packages.requirements()
    names = {extra: [each.name for each in wanted] for extra, wanted in found.items()}
    assert names == {"": ["torch"], "endpoint": ["httpx"], "gguf": ["gguf"]}
    assert found[""][0].specifier.contains("2.13.0+cpu")


def test_requirements_of_a_checkout() -> None:
    if sys.version_info < (3, 11):
        with pytest.raises(LookupError, match=r"Python 3\.10"):
            packages.requirements()
        return
    found = packages.requirements()
    assert [each.name for each in found[""]][:2] == ["torch", "transformers"]
    assert [each.name for each in found["gguf"]] == ["gguf", "accelerate"]


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert packages.installed_version("no-such-package") is None
    assert packages.versions().keys() == {"python", *packages.RECORDED}
