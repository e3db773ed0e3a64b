"""Command-line options, made from the fields of config dataclasses; --method, and the options that it brings.

Defaults, bounds and help texts come from the dataclasses (`model.options.option`).
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from ..methods import BUILT_IN, Method, find_method
from .command_line import OptionParser, user_errors

# In a checkout, the folder that holds `data/`; meaningless in an installed package.
CHECKOUT = Path(__file__).resolve().parents[2]
METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME"}

Config = TypeVar("Config")


def add_options(
    group: argparse._ActionsContainer, config_class: type, names: Collection[str] | None = None
) -> None:
    """Add an option for every field of a config dataclass, or for the named ones.

    An option that is not given sets no attribute.
    """
    hints = typing.get_type_hints(config_class)
    for item in dataclasses.fields(config_class):
        if names is not None and item.name not in names:
            continue
        flags = ["--" + item.name.replace("_", "-"), *item.metadata.get("aliases", ())]
        is_tuple = typing.get_origin(hints[item.name]) is tuple
        kind = _value_type(hints[item.name])
        text = item.metadata["help"].replace("%", "%%")
        if item.default not in (None, (), "") and kind is not bool:
            text += f" (default: {_shown(item.default)})"
        options: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            is_switch = item.default is False
            options["action"] = "store_true" if is_switch else argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            options["choices"] = item.metadata.get("choices") or None
            usual = None if options["choices"] else METAVARS[kind]
            options["metavar"] = item.metadata.get("metavar") or usual
            options["nargs"] = "+" if is_tuple else None
        group.add_argument(*flags, **options)


def _value_type(hint: Any) -> Callable[[str], Any]:
    """Return the type of a field's values: X for X, for X | None and for tuple[X, ...]."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    kind: Callable[[str], Any] = typing.get_args(hint)[0] if typing.get_origin(hint) else hint
    return kind


def _shown(default: Any) -> str:
    """Return a default as text without this machine's folders."""
    return str(default).removeprefix(f"{CHECKOUT}/")


def config_of(config_class: type[Config], given: Mapping[str, Any]) -> Config:
    """Return a config made from the given options.

    Raises:
        UserError: if a value is not allowed.
    """
    names = [item.name for item in dataclasses.fields(config_class) if item.name in given]  # type: ignore[arg-type]
    with user_errors():
        return config_class(**{name: given[name] for name in names})


def named_method(words: Sequence[str]) -> Method | None:
    """Return the method that --method names, before any other option is read: it decides which there are.

    Returns None without --method.

    Raises:
        UserError: if there is no such method.
    """
    parser = OptionParser(add_help=False)
    _add_name(parser)
    known, _ = parser.parse_known_args(list(words))  # type: ignore[no-untyped-call]
    with user_errors():
        return find_method(known.method) if known.method else None


def add_method(parser: argparse.ArgumentParser, method: Method | None) -> None:
    """Add --method, and the options of the method that it names."""
    _add_name(parser)
    if method is not None:
        group = parser.add_argument_group(f"options of {method.name}")
        add_options(group, method.config_class)


def options_of(method: Method | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the method, of those given and its defaults; {} without a method.

    Raises:
        UserError: if a value is not allowed.
    """
    return asdict(config_of(method.config_class, given)) if method else {}


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method",
        metavar="NAME",
        help=f"{', '.join(BUILT_IN)}, or package.module:DrafterClass (default: what pays on the "
        "device, hybrid on a CPU and recycling on a GPU); --method NAME --help lists its options",
    )
