"""The method of the library where none is named, and the tree of Token Recycling where none is given.

On a CPU a pass over the paper's tree of 80 nodes takes many times as long as one over a token, so that
the text comes slower than by plain decoding. What pays there chooses each draft's nodes by their measured
cost (docs/benchmarks.md has the figures). On a GPU, where a pass over a few rows costs about what one row does,
it is the paper's tree until a measurement says otherwise.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..methods import drafter_class
from ..options import unknown_name

logger = logging.getLogger(__name__)

AVERAGED = "recycling-averaged"


class MethodChoice(NamedTuple):
    """A method, its options, and why it was chosen where the user named none."""

    method: str
    options: dict[str, Any]
    why: str = ""


def default_choice(device: torch.device) -> MethodChoice:
    """Return the method that pays on a device, with the options that make it pay.

    Token Recycling with averaged rows on a GPU. On a CPU the hybrid, or prompt lookup with an automatic number
    of nodes where the hybrid's C++ cannot be built.
    """
    if device.type != "cpu":
        return MethodChoice(
            AVERAGED, {}, "on a GPU a pass over the tree costs about what one token does"
        )
    best, without_compiler = "hybrid", "pld"
    try:
        drafter_class(best).config_class()
    except ValueError as error:
        why = f"{without_compiler} instead of {best}: {error.__cause__ or error}"
        logger.warning(why)
        return MethodChoice(
            without_compiler, dict(drafter_class(without_compiler).auto_options), why
        )
    return MethodChoice(
        best, {}, "on a CPU each drafted token costs time, and it drafts as many as pay"
    )


def paying_options(method: str, given: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a method's options, which stay as given, and those that make it pay on a device: on a CPU an automatic
    number of nodes; ValueError if a given option is not allowed.
    """
    drafter = drafter_class(method)
    automatic = {**drafter.auto_options, **given}
    if device.type != "cpu" or automatic == given:
        return dict(given)
    try:
        drafter.config_class(**automatic)
    except ValueError as error:
        drafter.config_class(**given)  # whose own error comes first
        logger.warning(
            "%s: uses its fixed number of nodes, which is slow on a CPU: %s", method, error
        )
        return dict(given)
    return automatic


def named_method(method: str | None, own_method: str | None) -> str | None:
    """Return the method that the user or the decoder's class names; ValueError for two names."""
    if own_method is not None and method not in (None, own_method):
        raise ValueError(
            f"method: got {method!r}; allowed: none, this decoder's is {own_method}; "
            f"SpeculativeDecoder(model, tokenizer, method={method!r}) takes any"
        )
    return method or own_method


def choice_of(
    method: str | None, own_method: str | None, options: dict[str, Any], device: torch.device
) -> MethodChoice:
    """Return the method that the user names, else that of the decoder's class, else what pays on the device."""
    named_method(method, own_method)
    if method is not None:
        return MethodChoice(method, options)
    if own_method is not None:
        return MethodChoice(own_method, paying_options(own_method, options, device))
    if options:
        raise ValueError(
            f"options: got {', '.join(options)} without a method; name the method that has "
            'them, such as method="recycling"'
        )
    return default_choice(device)


def option_names(method: str) -> list[str]:
    return [field.name for field in dataclasses.fields(drafter_class(method).config_class)]


def config_of(method: str, options: Mapping[str, Any]) -> Any:
    """Return a method's config; a ValueError for an unknown option or a value that is not allowed."""
    names = option_names(method)
    for name in options:
        if name not in names:
            raise ValueError(unknown_name(f"option of {method}", name, names or ["none"]))
    return drafter_class(method).config_class(**options)
