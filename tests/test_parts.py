"""Parts of the tests: each has a share of what takes long, the other tests whole, and together they are all.

Run: pytest tests/test_parts.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import FIRST, MOST_CASES, TESTS, part_of, shared_out


class Item(NamedTuple):
    """What is read of a test."""

    nodeid: str
    path: Path


CORE = TESTS / "model/engine/test_tree.py"
LONG = TESTS / FIRST[0]
FAMILIES = [f"family {number}" for number in range(7)]


def cases_of(name: str, cases: list[str]) -> list[Item]:
    """Return a test with these cases."""
    return [Item(f"{CORE.name}::{name}[{case}]", CORE) for case in cases]


def parts_of(items: list[Item], parts: int) -> list[list[Any]]:
    """Return what each part runs."""
    given: list[Any] = [*items]
    return [shared_out(given, part, parts) for part in range(1, parts + 1)]


def test_cases_and_what_takes_long_are_shared_and_all_else_is_in_every_part() -> None:
    few = cases_of("test_few", FAMILIES[:MOST_CASES])
    many = cases_of("test_many", FAMILIES)
    long = [Item(f"{LONG.name}::test_{number}", LONG) for number in range(9)]
    items = [*few, *many, *long]
    assert parts_of(items, 1) == [items]
    parts = parts_of(items, 4)
    for part in parts:
        assert set(few) <= {*part} and part == [item for item in items if item in part]
        assert len(set(many) & {*part}) in (1, 2)
    for item in (*many, *long):
        assert sum(item in part for part in parts) == 1


def test_a_part_has_other_cases_of_another_test() -> None:
    items = [item for number in range(9) for item in cases_of(f"test_{number}", FAMILIES)]
    for part in parts_of(items, 4):
        assert {item.nodeid.partition("[")[2] for item in part} == {f"{one}]" for one in FAMILIES}


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "1/x", "/"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="--part: got"):
        part_of(text)


def test_a_part_is_one_of_so_many() -> None:
    assert part_of("2/3") == (2, 3)
