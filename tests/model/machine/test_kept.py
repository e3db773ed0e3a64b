"""A value is made once, and another key's takes its place.

Run: pytest tests/model/machine/test_kept.py
"""

from __future__ import annotations

from model.machine.hardware import Kept


def test_a_value_is_made_once_for_a_key_and_replaced_for_another() -> None:
    kept: Kept[list[str]] = Kept()
    first = kept.get("a", lambda: ["first"])
    assert kept.get("a", lambda: ["second"]) is first
    assert kept.get("b", lambda: ["third"]) == ["third"]
    assert kept.get("a", lambda: ["fourth"]) == ["fourth"]
