"""How reports look: aligned Markdown tables, cells, and the JSON line.

All reports round and align alike. A Markdown table with padded columns reads well in a terminal and
in a README.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd


class Cell(NamedTuple):
    """A cell of a table: its text, and the figure behind it (NaN for a text or no figure)."""

    text: str
    value: float = math.nan

    @property
    def sort_key(self) -> str:
        """The figure with all its digits, empty if there is none."""
        return "" if math.isnan(self.value) else repr(float(self.value))


class Table(NamedTuple):
    """A table for Markdown, LaTeX, CSV and a page."""

    caption: str  # one line that says what it shows
    header: list[str]  # one title a column
    rows: list[list[Cell]]  # cells, as many as titles in each row
    num_text_columns: int = 1  # how many leading columns are text; the others are figures
    notes: Sequence[str] = ()  # remarks below it, a line each
    # Titles of the columns that a page shows next to the method's name: also on a narrow screen.
    first: Sequence[str] = ()

    @property
    def markdown(self) -> str:
        """The table without its caption and notes."""
        texts = [[item.text for item in row] for row in self.rows]
        return markdown_table(self.header, texts, self.num_text_columns)

    @property
    def records(self) -> list[dict[str, str | float]]:
        """Its rows by column, with all digits; a figure that is missing is NaN."""
        return [
            {
                title: cell.text if place < self.num_text_columns else cell.value
                for place, (title, cell) in enumerate(zip(self.header, row, strict=True))
            }
            for row in self.rows
        ]

    @property
    def page_columns(self) -> list[int]:
        """The places of the columns in a page's order: the method's name, `first`, the others."""
        places = [0, *(self.header.index(title) for title in self.first)]
        return [*places, *(place for place in range(len(self.header)) if place not in places)]


class Section(NamedTuple):
    """A part of a report: heading, facts that hold for all of it, tables, notes, and on a page pictures below."""

    heading: str
    facts: Mapping[str, str] = MappingProxyType({})
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    pictures: Sequence[Any] = ()


def figure_text(value: float, deviation: float = math.nan, unit: str = "") -> str:
    """Return a figure with two decimals and its unit; `-` for NaN.

    `deviation` is that over runs, NaN for a single run.
    """
    if math.isnan(value):
        return "-"
    spread = "" if math.isnan(deviation) else f" ±{deviation:.2f}"
    return f"{value:.2f}{unit}{spread}"


def figure_cell(
    value: float,
    deviation: float = math.nan,
    unit: str = "",
    interval: tuple[float, float] = (math.nan, math.nan),
) -> Cell:
    """Return a `Cell` with the figure, its `figure_text`, and its interval unless that is NaN."""
    bounds = "" if math.isnan(interval[0]) else f" {bounds_text(interval)}"
    return Cell(figure_text(value, deviation, unit) + bounds, float(value))


def bounds_text(interval: tuple[float, float]) -> str:
    """Return an interval; `-` for one that says nothing, since its ends are a hundred times apart."""
    low, high = interval
    return "-" if high > 100 * low else f"[{low:.2f}, {high:.2f}]"


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int = 1
) -> str:
    """Return an aligned Markdown table without a final newline.

    The first `num_text_columns` are aligned left, the others, which are figures, right.
    """
    lines = [
        [value.replace("|", "\\|").replace("\n", " ") for value in line] for line in (header, *rows)
    ]
    # Three dashes are the least a Markdown table takes.
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths[:num_text_columns]]
    rule += ["-" * (width - 1) + ":" for width in widths[num_text_columns:]]
    aligned = [
        [
            value.ljust(width) if place < num_text_columns else value.rjust(width)
            for place, (value, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (aligned[0], rule, *aligned[1:]))


def csv_of(table: pd.DataFrame) -> str:
    """Return a table as CSV, one line a row; what a spreadsheet would compute begins with an apostrophe."""
    cells = table.map(_csv_cell)
    cells.columns = [_csv_cell(name) for name in table.columns]
    return cells.to_csv(index=False, lineterminator="\n")


def _csv_cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value  # figures may be negative
    line = " ".join(value.splitlines())
    return f"'{line}" if re.match(r"[=+\-@\t].", line) else line


def json_line(report: Mapping[str, Any]) -> str:
    """Return a report as one line of strict JSON; NaN, which JSON does not have, becomes null."""
    return json.dumps(_plain(report), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a NumPy scalar
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
