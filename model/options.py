"""Options of methods and runs: dataclass fields with help text and bounds.

The command line is built from them (`model.commands.options`), and each config checks itself
against them.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any

BUDGETS = ("fixed", "auto")
STARTS = ("hot", "cold")
DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")


def option(
    default: Any,
    text: str,
    *,
    least: int | None = None,
    choices: Sequence[str] = (),
    aliases: Sequence[str] = (),
) -> Any:
    """Return the field of an option.

    Args:
        default: the default value, always allowed.
        text: help text, one line.
        least: the smallest number allowed; None sets no bound.
        choices: the values allowed; empty allows all.
        aliases: other names on the command line.
    """
    bounds = {"least": least, "choices": choices}
    return field(default=default, metadata={"help": text, "aliases": aliases, **bounds})


def budget_option(default: str) -> Any:
    """Return the field that chooses between a fixed and a measured number of nodes."""
    text = "fixed: as large as the options say; auto: at most that, as much as pays on this device"
    return option(default, text, choices=BUDGETS)


def check_options(config: Any) -> None:
    """Raise ValueError for the first option whose value its field does not allow."""
    for item in fields(config):
        value = getattr(config, item.name)
        least, choices = item.metadata.get("least"), item.metadata.get("choices")
        if value == item.default:
            continue
        if choices and value not in choices:
            raise ValueError(f"{item.name}: got {value!r}; allowed: {', '.join(choices)}")
        if least is not None and value < least:
            raise ValueError(f"{item.name}: got {value}; allowed: {least} or more")


def unknown_name(what: str, name: object, known: Sequence[str]) -> str:
    """Return the text of an error for a name that is not in a table, with the likeliest meant."""
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{what}: got {name!r}; allowed: {', '.join(known)}{hint}"
