"""How charts look, and how they become files: one style, one look for each method, SVG and PNG.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; every method has a marker of
its own besides. Text in a picture is shown as it stands: a method named `$x$` is not set as
mathematics.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from io import BytesIO, StringIO
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito's set, with grey instead of its yellow, which is too pale on white.
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#777777", "#000000"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p")
GREY = "#666666"
WIDTH = 4.6  # inches; narrow, so that a picture shrunk to a phone's width is still legible
STYLE: Any = {  # matplotlib's own type lists every setting's name
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    # Text stays text: it can be read aloud, searched and copied, and needs no glyph outlines.
    "svg.fonttype": "none",
    "text.parse_math": False,
}


class Look(NamedTuple):
    """How a method is drawn, the same in every picture of a report."""

    color: str
    marker: str


class Picture(NamedTuple):
    """A drawn figure."""

    name: str  # of its files, unique in a report
    title: str
    caption: str  # how to read it
    figure: Figure


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """Give every method a colour and a marker, by name, so that a change of rank changes neither."""
    return {
        label: Look(COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)])
        for place, label in enumerate(sorted(set(labels)))
    }


def figure_of(height: float) -> tuple[Figure, Any]:
    """Return an empty figure of the common width and of a height in inches, and its axes."""
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.subplots()


def marks(look: Look, size: float = 5) -> dict[str, Any]:
    """Return options of a plot that draws a method's marks and no line; size in points."""
    return {"color": look.color, "marker": look.marker, "markersize": size, "linestyle": "none"}


def draw_legend(figure: Figure, axes: Any) -> None:
    """Draw a legend below the axes and enlarge the figure for it."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) <= 24 else 1
    texts = [wrapped(label, 24 if columns == 2 else 52) for label in labels]
    num_lines = sum(1 + label.count("\n") for label in texts) / columns
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(num_lines))
    figure.legend(handles, texts, loc="outside lower center", ncols=columns)


def legend_label(name: str) -> str:
    """Return a name as matplotlib's legend shows it; it leaves out those that begin with an underscore."""
    return f"\u200b{name}" if name.startswith("_") else name


def wrapped(text: str, width: int, max_lines: int = 3) -> str:
    """Return a text in lines of at most `width` characters; what is too long ends in dots."""
    return textwrap.fill(text, width, max_lines=max_lines, placeholder=" \u2026") or text


def svg_text(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element for a page, without the XML head.

    `name` is unique in the page; every id in the element begins with it.
    """
    out = StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()[out.getvalue().index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', svg)
    return svg.replace("url(#", f"url(#{name}-")


def png_bytes(figure: Figure) -> bytes:
    out = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format="png", dpi=200)
    return out.getvalue()
