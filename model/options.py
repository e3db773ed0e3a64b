"""Options of methods and runs: dataclass fields with help text and bounds.

The command line is built from them (`model.commands.command_line`), and each config (`Options`) checks
itself against them.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from typing import Any

BUDGETS = ("fixed", "auto")
STARTS = ("hot", "cold")
DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")
# How quantised weights are kept.
IN_WHOLE_NUMBERS = "native-int8"
NATIVE = ("native", IN_WHOLE_NUMBERS)
WEIGHTS = ("auto", *NATIVE, "dequantised")
# Logits divided by a temperature outside these bounds overflow or vanish in float32.
TEMPERATURES = (1e-6, 1e6)


def option(
    default: Any,
    text: str,
    *,
    least: int | None = None,
    most: int | None = None,
    choices: Sequence[str] = (),
    aliases: Sequence[str] = (),
    metavar: str = "",
    derived: Callable[[Mapping[str, Any]], Any] | None = None,
) -> Any:
    """Return the field of an option.

    Args:
        default: the default value, always allowed.
        text: help text, one line.
        least: the smallest number allowed; None sets no bound.
        most: the largest, of an option with a least one; None sets no bound.
        choices: the values allowed; empty allows all.
        aliases: other names on the command line.
        metavar: what stands for the value in help; empty: a word for its type.
        derived: the value of an option left at None, from the values of the others.
    """
    bounds = {"least": least, "most": most, "choices": choices, "derived": derived}
    shown = {"help": text, "aliases": aliases, "metavar": metavar}
    return field(default=default, metadata=shown | bounds)


def budget_option(default: str) -> Any:
    """Return the field that chooses between a fixed and a measured number of nodes."""
    text = (
        "fixed: drafts as large as the options say; auto: at most that large, sized to the device"
    )
    return option(default, text, choices=BUDGETS)


def start_option(text: str) -> Any:
    """Return the field that says whether what lives across questions, in words, does so; by default it does."""
    return option("hot", f"hot: {text} across questions; cold: cleared before each", choices=STARTS)


def integer(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> int:
    """Return an integer, numpy's too, as Python's; ValueError if it is none (True is none), or out of bounds."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not least <= int(value) <= most:
        bounds = f" of {least:g} or more" if most == math.inf else f" of {least} to {most}"
        raise ValueError(
            f"{name}: got {value!r}; allowed: integers{bounds if math.isfinite(least) else ''}"
        )
    return int(value)


def number(name: str, value: Any, allowed: str = "finite numbers") -> float:
    """Return a finite number, numpy's too, as Python's; ValueError, ended by `allowed`, for True, "0.5" or NaN."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name}: got {value!r}; allowed: {allowed}")
    return float(value)


def temperature_of(value: Any) -> float:
    """Return a temperature; ValueError for any other value than 0, greedy decoding, and those in `TEMPERATURES`."""
    least, most = TEMPERATURES
    allowed = f"0 (greedy), or {least:g} to {most:g} (sampling)"
    found = number("temperature", value, allowed)
    if found and not least <= found <= most:
        raise ValueError(f"temperature: got {value!r}; allowed: {allowed}")
    return found


@dataclass(frozen=True, slots=True)
class Options:
    """Base of configs: it checks each option when it is made, and gives derived ones their values.

    Raises:
        ValueError: for the first option whose value its field does not allow, else for options that
            do not go together.
    """

    def __post_init__(self) -> None:
        for item in fields(self):
            value = self._typed(item)
            least, most, choices = (item.metadata.get(key) for key in ("least", "most", "choices"))
            if value == item.default:
                continue
            if choices and value not in choices:
                raise ValueError(f"{item.name}: got {value!r}; allowed: {', '.join(choices)}")
            if least is not None and (value < least or (most is not None and value > most)):
                allowed = f"{least} or more" if most is None else f"{least} to {most}"
                raise ValueError(f"{item.name}: got {value}; allowed: {allowed}")
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        for name, value in resolved(type(self), given).items():
            if value is not given[name]:
                object.__setattr__(self, name, value)  # the dataclass is frozen
        self._check()

    def _typed(self, item: Field[Any]) -> Any:
        """Return an option's value in Python's own type; raise ValueError if it is of another type."""
        value = given = getattr(self, item.name)
        types = set(re.findall(r"\w+", getattr(item.type, "__name__", str(item.type))))
        if value is None and (item.default is None or "None" in types):
            return None
        types -= {"None"}
        if types == {"int"}:
            value = integer(item.name, given)
        elif types == {"float"}:
            number(item.name, given)
        elif types == {"bool"} and not isinstance(given, bool):
            raise ValueError(f"{item.name}: got {given!r}; allowed: True or False")
        elif types == {"str"} and not isinstance(given, str):
            if not isinstance(given, os.PathLike):
                raise ValueError(f"{item.name}: got {given!r}; allowed: a text")
            value = os.fspath(given)
        elif types == {"tuple", "str"}:
            if not isinstance(given, list | tuple) or not all(isinstance(it, str) for it in given):
                raise ValueError(f"{item.name}: got {given!r}; allowed: a tuple of texts")
            value = tuple(given)
        if value is not given:
            object.__setattr__(self, item.name, value)  # the dataclass is frozen
        return value

    def _check(self) -> None:
        """Check what bounds and choices do not tell; here: nothing."""


def resolved(config_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by name, with the derived values of those left at None."""
    known = {item.name: item.default for item in fields(config_class)} | dict(values)
    for item in fields(config_class):
        derived = item.metadata.get("derived")
        if derived is not None and known[item.name] is None:
            known[item.name] = derived(known)
    return {name: known[name] for name in values}


def chosen(config: Any) -> dict[str, Any]:
    """Return the options that have another value than they would have if left out."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    usual = {
        item.name: resolved(type(config), values | {item.name: item.default})[item.name]
        for item in fields(config)
    }
    return {name: value for name, value in values.items() if value != usual[name]}


@dataclass(frozen=True, slots=True)
class Words:
    """The words of tables for a method, which its package keeps in `WORDS`, by the method's name."""

    title: str
    published: str = ""  # its name in other people's tables; empty if it is in none
    # Options, or "name=value", in words; "{}" stands for the value.
    options: Mapping[str, str] = field(default_factory=dict)
    # By "name=value" of an option, words that follow the title; the first one counts. They tell what a paper
    # describes from what this project made of it.
    variants: Mapping[str, str] = field(default_factory=dict)


def unknown_name(what: str, name: object, known: Sequence[str]) -> str:
    """Return the text of an error for a name that is not in a table, with the likeliest meant."""
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{what}: got {name!r}; allowed: {', '.join(known)}{hint}"
