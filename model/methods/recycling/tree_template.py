"""Named tree templates of Token Recycling: the rank in the adjacency matrix for each node of a draft.

Named templates are the JSON files in `templates/`; any other JSON file of the same form can be given
by path (`growth.tree_template`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...options import unknown_name
from ..growth.tree_template import TreeTemplate, read_template

TEMPLATE_FOLDER = Path(__file__).parent / "templates"


def template_names() -> list[str]:
    """Return the names of the templates that come with the project."""
    return sorted(file.stem for file in TEMPLATE_FOLDER.glob("*.json"))


def load_template(version: str, others: Sequence[str] = ()) -> TreeTemplate:
    """Load a template by name, or from a JSON file by path.

    Args:
        version: the name or the path.
        others: names that the caller takes beside those of templates, for the error's text.

    Raises:
        ValueError: if the name is unknown, the file cannot be read or parsed, or a path in it is
            wrong.
    """
    is_named = version in template_names()
    file = TEMPLATE_FOLDER / f"{version}.json" if is_named else Path(version)
    if not is_named and not file.is_file():
        known = unknown_name("tree_version", version, [*template_names(), *others])
        raise ValueError(f"{known}, or the path of a JSON file of rank paths")
    return read_template(file, version)
