"""The page of models holds the families that the tests prove.

Run: pytest tests/model/families/test_list_models.py
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.model.families import list_models
from tests.model.families.families import CHAINS, FAMILIES, REFUSED, TREES
from tests.model.families.list_models import BEGIN, COMMAND, END, PAGE, render_section, with_section


def rows_of(section: str) -> list[list[str]]:
    """Return the cells of the first table's rows, header left out."""
    table = section.partition("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names_of(cell: str) -> list[str]:
    """Return the names of a cell's families, variants left out."""
    return re.sub(r" \((?!\d)[^)]*\)", "", cell).split(", ")


def test_the_page_holds_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert BEGIN in text and END in text, (
        f"{PAGE} lacks the markers {BEGIN} and {END}; add them on two lines and run: {COMMAND}"
    )
    assert with_section(text) == text, f"{PAGE} is out of date; run: {COMMAND}"


def test_every_family_stands_once_in_the_row_of_its_verdict() -> None:
    rows = rows_of(render_section())
    for families, verdict in ((TREES, "trees"), (CHAINS, "chains only"), (REFUSED, "refused")):
        for family in families:
            name, _, variant = family.name.partition(", ")
            matching = [
                row
                for row in rows
                if row[1].startswith(verdict) and name in names_of(row[0]) and variant in row[0]
            ]
            assert len(matching) == 1, f"{family.name} is not in one row of {verdict}"
    reasons = {row[2] for row in rows if row[1] != "trees"}
    assert "" not in reasons, "a verdict other than trees needs its reason"


def test_the_table_follows_the_families(monkeypatch: pytest.MonkeyPatch) -> None:
    before = render_section()
    refused = dataclasses.replace(FAMILIES[0], outcome="refused", note="for a test")
    monkeypatch.setattr(list_models, "FAMILIES", [refused, *FAMILIES[1:]])
    assert render_section() != before
    assert "| Llama (grouped heads) | refused | for a test |" in render_section()


def test_only_what_stands_between_the_markers_is_written() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_section(text) == f"before\n{render_section()}\nafter\n"
    assert with_section(with_section(text)) == with_section(text)


@pytest.mark.parametrize(
    "text", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}", f"{BEGIN}{END}{END}"]
)
def test_markers_that_are_missing_or_twice_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="markers"):
        with_section(text)
