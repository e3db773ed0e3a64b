"""Notes of the library: commands show them on stderr, the library by itself says nothing.

Run: pytest tests/model/commands/test_notes.py
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from model.commands import command_line


@pytest.fixture
def notes() -> Iterator[logging.Logger]:
    """The logger of a room that notes something, as before any command."""
    loggers = [logging.getLogger(f"model.{room}") for room in command_line.NOTING]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    for logger in loggers:
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
    yield loggers[0]
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_a_command_shows_notes_once_and_the_library_none(
    notes: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    notes.getChild("measure").info("not shown")
    assert capsys.readouterr().err == ""

    def command(words: object) -> int:
        command_line.show_notes()  # as a worker of the same process would
        notes.getChild("measure").info("kept: %d", 3)
        return 0

    with pytest.raises(SystemExit):
        command_line.run_command(command)
    assert capsys.readouterr().err == "kept: 3\n"
