"""A chat's output in a terminal becomes a picture: every token, its colour, its time.

Run: pytest tests/scripts/test_record_chat.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from model.chat.terminal import DIM, RUN_COLOURS
from model.commands.command_line import UserError
from scripts.record_chat import Piece, main, picture, pieces_of, recorded

FIRST, SECOND = RUN_COLOURS
SAID = f"\x1b[{FIRST}mA <b>\x1b[0m\x1b[{SECOND}m & more\x1b[0m\r\n\x1b[{DIM}m[hybrid: 2 steps]\x1b[0m\r\n"


def test_pieces_come_with_their_last_byte() -> None:
    data = SAID.encode()
    pieces = pieces_of([(1.0, data[:9]), (2.0, data[9:20]), (3.0, data[20:])])
    assert [piece.text for piece in pieces] == ["A <b>", " & more", "[hybrid: 2 steps]"]
    assert [piece.colour for piece in pieces] == [FIRST, SECOND, DIM]
    assert [piece.seconds for piece in pieces] == [2.0, 3.0, 3.0]


def test_a_picture_has_every_character_once_and_in_order() -> None:
    words = [f"word{number} " for number in range(30)]
    answer = [Piece(0.1 * i, RUN_COLOURS[i % 2], word) for i, word in enumerate(words)]
    answer.append(Piece(9.0, FIRST, "\n  last <line>"))
    figures = Piece(9.1, DIM, "[pld: 31 steps]")
    root = ElementTree.fromstring(picture("Why & how?", [*answer, figures], slower=2))
    spans = [each for each in root.iter() if "k c" in each.get("class", "")]
    assert "".join(each.text or "" for each in spans) == "".join(words) + "  last <line>"
    delays = [float(re.findall(r"[\d.]+", each.get("style", ""))[0]) for each in spans]
    assert delays == sorted(delays) and delays[0] == 1 and delays[-1] == 19
    text = "".join(root.itertext())
    assert "> Why & how?" in text and "[pld: 31 steps]" in text and "2 times slower" in text


def test_a_command_is_recorded_in_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    code = f"import sys; print({SAID.strip()!r}) if sys.stdout.isatty() else 1"
    pieces = recorded([sys.executable, "-c", code])
    assert [piece.text for piece in pieces][-1] == "[hybrid: 2 steps]"
    assert capfd.readouterr().out == "", "it is not passed on"


def test_a_chat_that_fails_is_one_line() -> None:
    with pytest.raises(UserError, match="chat: failed: error: no such model"):
        recorded([sys.executable, "-c", "import sys; print('error: no such model'); sys.exit(2)"])


@pytest.mark.parametrize(
    ("words", "error"), [(["--dtype", "auto"], "with --prompt TEXT"), (["--prompt"], "--prompt")]
)
def test_options_without_a_prompt_are_refused(words: list[str], error: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=error):
        main(["--out", str(tmp_path / "chat.svg"), "--", *words])
