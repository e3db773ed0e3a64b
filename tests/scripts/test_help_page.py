"""The pages that are made: docs/help.md has every command, and is what the commands say.

Run: pytest tests/scripts/test_help_page.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from model.api.generate_arguments import table
from scripts.help_page import COMMANDS, INFERENCE, LIBRARY, PAGE, page, with_table

ROOT = PAGE.parents[1]
# Old names of other commands, and what all commands share.
NO_COMMANDS = ("evaluation.inference_", "evaluation.eval", "evaluation.inference.command")
NO_COMMANDS += ("model.commands.command_line",)


def module_of(file: Path) -> str:
    """Return what `python -m` takes for a file that can be run."""
    place = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return place.removesuffix(".__main__")


def test_every_command_is_on_the_page() -> None:
    listed = {command.split()[0] for commands in COMMANDS.values() for command in commands}
    files = [
        file for room in ("model", "evaluation", "scripts") for file in (ROOT / room).rglob("*.py")
    ]
    runnable = {module_of(file) for file in files if '== "__main__":' in file.read_text("utf-8")}
    others = {name for name in runnable if name.startswith(NO_COMMANDS) or name == "model"}
    assert runnable - others == listed
    assert INFERENCE in listed


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse wraps lines otherwise")
def test_the_page_is_what_the_commands_say() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run python -m scripts.help_page"


def test_the_librarys_page_has_the_table_of_arguments() -> None:
    text = LIBRARY.read_text(encoding="utf-8")
    assert with_table(text) == text and table() in text
    assert with_table(text.replace(table(), "stale")) == text
    with pytest.raises(AssertionError, match="has no place for the table"):
        with_table("no marks")


def test_the_page_has_no_path_of_a_machine() -> None:
    assert not re.search(r"/(home|root|work|tmp|usr)/", PAGE.read_text(encoding="utf-8"))
