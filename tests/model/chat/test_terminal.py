"""Terminal output of the chat: safe text, colours only where they show, Ctrl-C.

Run: pytest tests/model/chat/test_terminal.py
"""

from __future__ import annotations

import io
import signal

import pytest

from model.chat.__main__ import painter
from model.commands.command_line import Interrupt, printable


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x1b[2J", r"\x1b[2J"),
        ("over\rwritten\b\x7f", r"over\rwritten\x08\x7f"),
        ("\x9b31m \x90q\x9c", r"\x9b31m \x90q\x9c"),  # the one-byte forms of escape sequences
        ("file\u202etxt.exe\u2066", r"file\u202etxt.exe\u2066"),
        ("\x00\ud800", r"\x00\ud800"),
    ],
)
def test_what_could_steer_a_terminal_is_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_all_other_text_is_left_alone() -> None:
    text = "two\nlines\tand ünïcödé, 漢字, עברית, 👩‍👩‍👧 \\x1b"
    assert printable(text) == text
    controls = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
    assert not set(printable("".join(controls))) & set(controls)


def test_colours_need_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert painter(Screen())("run", 36) == "\x1b[36mrun\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "")  # the convention: only a value that is not empty counts
    assert painter(Screen())("run", 36) == "\x1b[36mrun\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert painter(Screen())("run", 36) == "run"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert painter(Screen())("run", 36) == "run"


def test_text_is_painted_where_colours_show_only() -> None:
    assert painter(Screen())("run", 36) == "\x1b[36mrun\x1b[0m"
    assert painter(Screen())("", 36) == ""
    assert painter(io.StringIO())("run", 36) == "run"


def test_the_first_interrupt_is_noted_and_the_second_raised() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.is_noted
        signal.raise_signal(signal.SIGINT)
        assert interrupt.is_noted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before
