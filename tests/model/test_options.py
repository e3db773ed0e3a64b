"""Options of every method and of runs: a value that a field does not allow is refused by name.

Run: pytest tests/model/test_options.py
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from evaluation.answering.config import PARTS
from model.methods.registry import METHODS, drafter_class

CONFIGS = (*PARTS.values(), *(drafter_class(method).config_class for method in METHODS))


def bounded(bound: str) -> list[Any]:
    """Return every config class with each of its options that has this bound."""
    return [
        pytest.param(cls, item, id=f"{cls.__name__}.{item.name}")
        for cls in CONFIGS
        for item in fields(cls)
        if item.metadata[bound] not in (None, ())
    ]


@pytest.mark.parametrize(("cls", "item"), bounded("least"))
def test_numbers_below_the_least_are_refused(cls: Any, item: Any) -> None:
    least = item.metadata["least"]
    with pytest.raises(
        ValueError, match=f"^{item.name}: got {least - 1}; allowed: {least} or more$"
    ):
        cls(**{item.name: least - 1})


@pytest.mark.parametrize(("cls", "item"), bounded("choices"))
def test_values_that_are_no_choice_are_refused(cls: Any, item: Any) -> None:
    allowed = ", ".join(item.metadata["choices"])
    for value in ("something", "auto" * 2, ""):
        with pytest.raises(ValueError, match=f"^{item.name}: got '{value}'; allowed: {allowed}$"):
            cls(**{item.name: value})
