"""The rooms of the harness import each other in one direction, and nothing imports a command.

Run: pytest tests/evaluation/test_rooms.py
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.evaluation.conftest import ROOT

# Rooms of one number do not import each other; each imports rooms of lower numbers.
LEVELS = {
    **{"questions": 0, "answers": 1, "answering": 2, "scoring": 2},
    **{"reporting": 3, "checking": 3},
}
HARNESS = ROOT / "evaluation"


def imports_of(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports, within functions too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_every_folder_is_a_room() -> None:
    rooms = {file.parent.name for file in HARNESS.glob("*/__init__.py")}
    assert rooms == set(LEVELS)


@pytest.mark.parametrize("room", LEVELS)
def test_a_room_imports_rooms_below_it_and_no_command(room: str) -> None:
    below = {name for name, level in LEVELS.items() if level < LEVELS[room]} | {room}
    for file in (HARNESS / room).glob("*.py"):
        for name in imports_of(file):
            assert not name.startswith("scripts"), f"{file} imports {name}"
            if name.startswith("evaluation."):
                assert name.split(".")[1] in below, f"{file} imports {name}"


def test_no_command_imports_a_command() -> None:
    for file in HARNESS.glob("*.py"):
        for name in imports_of(file):
            if name.startswith("evaluation."):
                assert name.split(".")[1] in LEVELS, f"{file} imports {name}"


def test_the_library_imports_nothing_of_the_harness() -> None:
    for file in (ROOT / "model").rglob("*.py"):
        for name in imports_of(file):
            assert name.split(".")[0] not in ("evaluation", "scripts"), f"{file} imports {name}"


@pytest.mark.parametrize("command", ["speed", "leaderboard", "defects"])
def test_a_report_opens_without_torch(command: str) -> None:
    code = f"import sys, evaluation.{command}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
