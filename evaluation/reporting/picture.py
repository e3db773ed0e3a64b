"""A drawn figure with its name, title and caption."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """A drawn figure.

    Attributes:
        name: What its files are called; differs from the names of the others beside it.
        title: One line.
        caption: How to read it.
        figure: The drawing.
    """

    name: str
    title: str
    caption: str
    figure: Figure
