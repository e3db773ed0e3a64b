"""Notes of the library: commands show them on stderr, the library by itself says nothing.

Run: pytest tests/model/commands/test_notes.py
"""

from __future__ import annotations

import logging

import pytest

from model.commands import command_line


def test_a_command_shows_notes_once_and_the_library_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    notes = logging.getLogger(f"{command_line.LIBRARY}.{command_line.NOTING[0]}")
    notes.getChild("measure").info("not shown")
    assert capsys.readouterr().err == ""

    def command(words: object) -> int:
        command_line.show_notes()  # as a worker of the same process would
        notes.getChild("measure").info("kept: %d", 3)
        return 0

    with pytest.raises(SystemExit):
        command_line.run_command(command)
    assert capsys.readouterr().err == "kept: 3\n"


def test_a_command_does_not_pass_on_that_nvcc_finds_no_gpu() -> None:
    command_line.show_notes()
    assert not logging.getLogger("torch.utils.cpp_extension").isEnabledFor(logging.WARNING)
