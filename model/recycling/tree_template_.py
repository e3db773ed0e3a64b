"""The import path of TokenRecycling's own scripts: `choose_tree_template`, kept for code written
against it.
"""

from __future__ import annotations

from ..methods.recycling.tree_template import load_template


def choose_tree_template(version: str) -> list[list[int]]:
    """Return the rank paths of a template.

    Raises:
        ValueError: if the template is unknown or wrong.
    """
    return [list(path) for path in load_template(version).paths]
