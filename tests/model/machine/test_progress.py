"""Progress in a log file is a line now and then, without control characters.

Run: pytest tests/model/machine/test_progress.py
"""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from model.machine import timing as module
from model.machine.timing import progress


class Stream(StringIO):
    """A standard error that is a terminal or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def shown(monkeypatch: pytest.MonkeyPatch, is_terminal: bool = False) -> str:
    """Return what a run of 300 answers writes, with figures and a message."""
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(total=300, unit="answer") as bar:
        for number in range(300):
            bar.set_postfix_str(f"MAT {number}", refresh=False)
            bar.update()
            if number == 100:
                bar.write("question 7 failed", file=bar.fp)
    return stream.getvalue()


def test_a_log_file_gets_the_first_and_the_last_state_and_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = shown(monkeypatch)
    assert text.replace("\n", "").isprintable()
    lines = text.splitlines()
    assert lines[0].startswith("0/300 [")
    assert lines.count("question 7 failed") == 1
    assert lines[-1].startswith("300/300 [") and lines[-1].endswith("MAT 299]")
    assert len(lines) <= 5, "hundreds of lines for hundreds of answers"


def test_a_line_comes_with_every_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_INTERVAL", 0.0)
    assert len(shown(monkeypatch).splitlines()) > 300


def test_a_terminal_gets_a_bar_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, is_terminal=True)
    assert "\r" in text and "100%" in text


def test_what_is_gone_through_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(is_terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress(range(4), desc="hot", unit="question")) == [0, 1, 2, 3]
    assert stream.getvalue().splitlines()[-1].startswith("hot: 4/4 [")
