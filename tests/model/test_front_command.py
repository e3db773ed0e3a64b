"""The one command of the package: it opens each command by its name, and the harness where there is one.

Run: pytest tests/model/test_front_command.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import model.__main__ as front
from model import __version__

ROOT = Path(__file__).resolve().parents[2]


def ended(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    """Run the command; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["token-recycling", *words])
    with pytest.raises(SystemExit) as stop:
        front.main()
    return stop.value.code


@pytest.mark.parametrize("name", front.COMMANDS)
def test_each_command_has_its_own_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, name, "--help") == 0
    module = "evaluation.compare" if name == "compare" else f"model.{name}"
    assert f"usage: python -m {module} " in capsys.readouterr().out


def test_it_lists_its_commands_and_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, "--help") == 0
    listed = re.findall(r"^  (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert (
        listed == [*front.COMMANDS] == ["chat", "generate", "serve", "compare", "build", "doctor"]
    )
    assert ended(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"token-recycling {__version__}\n"


@pytest.mark.parametrize("words", [(), ("servo",)])
def test_another_name_is_an_error_in_a_line(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: command: got {''.join(words)!r}; allowed: chat, generate, ")
    assert said.count("\n") == 1
    assert ("did you mean serve?" in said) == bool(words)


def test_without_a_checkout_there_is_no_harness(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(front, "__file__", "/elsewhere/token_recycling/__main__.py")
    assert ended(monkeypatch, "compare", "--help") == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("error: compare: is in a checkout")
        and "pip install -e '.[harness]'" in said
    )
