"""The tables of model families in `docs/models.md`, written from what the tests check.

Run: python -m tests.model.families.list_models
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.model.families.families import FAMILIES
from tests.model.families.family import Family

PAGE = Path(__file__).resolve().parents[3] / "docs/models.md"
COMMAND = "python -m tests.model.families.list_models"
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"
VERSIONS = ("4.57.6", "5.23.0")
OUTCOMES = {"trees": "trees", "chains": "chains only", "refused": "refused", "absent": "not there"}


def row(family: Family) -> str:
    """Return a family's line of the page's table."""
    before, now = family.outcome_in_4 or family.outcome, family.outcome
    cells = (family.name, f"`{family.config}`", OUTCOMES[before], OUTCOMES[now], family.note)
    return f"| {' | '.join(cells)} |"


def render_section() -> str:
    """Return the markers and both tables between them: a line a verdict, and a line a family."""
    groups: dict[tuple[str, str], list[Family]] = {}
    for family in FAMILIES:
        groups.setdefault((_verdict(family), _reason(family)), []).append(family)
    rows = [
        f"| {_short_names(families)} | {verdict} | {reason} |"
        for (verdict, reason), families in groups.items()
    ]
    by_verdict = ["| families | verdict | reason |", "|---|---|---|", *rows]
    head = f"| family | config | {' | '.join(VERSIONS)} | remark |"
    by_family = [head, "|---|---|---|---|---|", *map(row, FAMILIES)]
    return "\n".join([BEGIN, *by_verdict, "", *by_family, END])


def with_section(text: str) -> str:
    """Return the text of a page with the tables of today between its markers.

    Raises:
        ValueError: if the two markers are not there once each, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in before + after:
        raise ValueError(f"{PAGE.name}: got no single pair of markers; allowed: {BEGIN} ... {END}")
    return before + render_section() + after


def _verdict(family: Family) -> str:
    """Return a family's verdict, with that of the older version if it differs."""
    verdict = OUTCOMES[family.outcome]
    is_other = family.outcome_in_4 not in ("", "absent", family.outcome)
    return verdict + (f" ({OUTCOMES[family.outcome_in_4]} in 4.57)" if is_other else "")


def _reason(family: Family) -> str:
    """Return why a family's drafts may not branch, in either version; empty where they may."""
    if family.outcome != "trees":
        return family.note
    in_4 = {"chains": "a tree fails", "refused": "a chain fails"}.get(family.outcome_in_4)
    return f"{in_4} the self-test in 4.57" if in_4 else ""


def _short_names(families: Iterable[Family]) -> str:
    """Return the names of families on one line, the variants of one in brackets after it."""
    variants: dict[str, list[str]] = {}
    for family in families:
        name, _, variant = family.name.partition(", ")
        variants.setdefault(name, [])
        if variant:
            variants[name].append(variant)
    return ", ".join(
        f"{name} ({', '.join(found)})" if found else name for name, found in variants.items()
    )


def main() -> None:
    """Write both tables."""
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
