"""Options of every method and of runs: a value that a field does not allow is refused by name.

Run: pytest tests/model/test_options.py
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from evaluation.inference.config import PARTS
from model.methods import METHODS, drafter_class
from model.methods.samd.drafter import SamdConfig
from model.options import chosen

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
    least, most = item.metadata["least"], item.metadata["most"]
    allowed = f"{least} or more" if most is None else f"{least} to {most}"
    with pytest.raises(ValueError, match=f"^{item.name}: got {least - 1}; allowed: {allowed}$"):
        cls(**{item.name: least - 1})


@pytest.mark.parametrize(("cls", "item"), bounded("most"))
def test_numbers_above_the_most_are_refused(cls: Any, item: Any) -> None:
    least, most = item.metadata["least"], item.metadata["most"]
    cls(**{item.name: most})
    with pytest.raises(
        ValueError, match=f"^{item.name}: got {most + 1}; allowed: {least} to {most}$"
    ):
        cls(**{item.name: most + 1})


@pytest.mark.parametrize(("cls", "item"), bounded("choices"))
def test_values_that_are_no_choice_are_refused(cls: Any, item: Any) -> None:
    allowed = ", ".join(item.metadata["choices"])
    for value in ("something", "auto" * 2, ""):
        with pytest.raises(ValueError, match=f"^{item.name}: got '{value}'; allowed: {allowed}$"):
            cls(**{item.name: value})


@pytest.mark.parametrize("cls", CONFIGS)
def test_values_of_another_type_are_refused(cls: Any) -> None:
    wrong = {"int": (True, 2.5, "2"), "float": ("0.5", float("nan")), "str": (3,), "bool": (1,)}
    wrong["tuple[str, ...]"] = ("text", 3, (3,))
    for item in fields(cls):
        kind = getattr(item.type, "__name__", str(item.type))  # a name where annotations are texts
        for value in wrong[kind.removesuffix(" | None")]:
            with pytest.raises(
                ValueError, match=re.escape(f"{item.name}: got {value!r}; allowed: ")
            ):
                cls(**{item.name: value})


def test_an_option_left_open_has_the_value_that_follows_from_the_others() -> None:
    plain, alone = SamdConfig(), SamdConfig(fallback="none")
    assert (plain.threshold, alone.threshold) == (5, 1)
    assert SamdConfig(threshold=3).threshold == 3


def test_chosen_options_are_those_that_leaving_out_would_change() -> None:
    assert chosen(SamdConfig()) == {}
    assert chosen(SamdConfig(fallback="none")) == {"fallback": "none"}
    assert chosen(SamdConfig(fallback="none", threshold=5)) == {"fallback": "none", "threshold": 5}
    assert chosen(SamdConfig(threshold=5)) == {}, "the same as without"
