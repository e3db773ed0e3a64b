"""The published TokenRecycling import path of `choose_tree_template`, kept for existing code."""

from __future__ import annotations

from ..methods.recycling.tree_template import load_template


def choose_tree_template(version: str) -> list[list[int]]:
    """Return the rank paths of a template.

    Raises:
        ValueError: if the template is unknown or wrong.
    """
    return [list(path) for path in load_template(version).paths]
