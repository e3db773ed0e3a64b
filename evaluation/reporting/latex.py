r"""Tables as LaTeX for a paper: booktabs, and no other package."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from evaluation.reporting.tables import Cell, Table

PREAMBLE = "% Needs \\usepackage{booktabs}, nothing else. Sized for a page of two columns."
LONGEST_NAME = 24  # characters; a longer one's bracket goes on the line below
SPECIAL = {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"},
    **{character: f"\\{character}" for character in "{}$&#%_"},
    **{'"': "''", "`": r"\textasciigrave{}"},
    # An opening bracket after \\ would be read as an option.
    **{"[": "{[}", "]": "{]}"},
}


def latex_text(tables: Sequence[Table]) -> str:
    """Return tables as floats of a LaTeX document, each with its caption, its notes and a label by its place."""
    floats = (_float(table, place) for place, table in enumerate(tables, start=1))
    return "\n\n".join([PREAMBLE, *floats]) + "\n"


def escaped(text: str) -> str:
    """Return a text as LaTeX shows it; what its default fonts lack is shown as its code point."""
    lacking = {one: f"{{[}}U+{ord(one):04X}{{]}}" for one in text if not " " <= one <= "~"}
    shown = lacking | SPECIAL
    return "".join(shown.get(one, one) for one in re.sub(r"\s", " ", text))


def _float(table: Table, place: int) -> str:
    columns = "l" * table.num_text_columns
    columns += "r" * (len(table.header) - table.num_text_columns)
    lines = [
        r"\begin{table*}[t]",
        r"\centering",
        rf"\caption{{{escaped(table.caption)}}}",
        rf"\label{{tab:speculative-decoding-{place}}}",
        r"\scriptsize",
        r"\setlength{\tabcolsep}{2pt}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(_stacked(title) for title in table.header) + r" \\",
        r"\midrule",
        *(line for row in table.rows for line in _lines(row)),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par\raggedright\smallskip {escaped(note)}" for note in table.notes),
        r"\end{table*}",
    ]
    return "\n".join(lines)


def _stacked(title: str) -> str:
    """Return a column's title with one word a line."""
    words = [escaped(word) for word in title.replace(" / ", "/").split()]
    return words[0] if len(words) == 1 else r"\shortstack{" + r" \\ ".join(words) + "}"


def _lines(row: Sequence[Cell]) -> Iterator[str]:
    """Yield a row; the rest of a figure or name goes on a line below, which keeps columns narrow."""
    parts = [_parts(cell) for cell in row]
    yield " & ".join(first for first, _ in parts) + r" \\"
    if any(second for _, second in parts):
        yield " & ".join(second for _, second in parts) + r" \\"
        yield r"\addlinespace[2pt]"


def _parts(cell: Cell) -> tuple[str, str]:
    """Split a cell's text where its line breaks; ratios get a multiplication sign."""
    if math.isnan(cell.value) and len(cell.text) <= LONGEST_NAME:
        return escaped(cell.text), ""
    if math.isnan(cell.value):
        first, bracket, second = cell.text.partition(" (")
        return escaped(first), escaped((bracket + second).strip())
    first, _, second = cell.text.partition(" ")
    return re.sub(r"(?<=\d)x$", r"$\\times$", first), escaped(second)
