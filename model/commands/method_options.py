"""The option --method, and the options of the method that it names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..methods.registry import BUILT_IN, Method, find_method
from .command_line import OptionParser, user_errors
from .options import add_options, config_of


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
