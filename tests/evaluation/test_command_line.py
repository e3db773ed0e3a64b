"""How a command ends: one line on stderr, and the code that the error has.

Run: pytest tests/evaluation/test_command_line.py
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from evaluation.command_line import UserError, run_command
from scripts.download_data import NetworkError


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("got 1;\nallowed: 2"), 2, "error: got 1; allowed: 2\n"),
        (NetworkError("no host"), 1, "error: no host\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_is_one_line_and_its_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    def main(argv: Sequence[str] | None) -> int:
        raise error

    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code == code
    assert capsys.readouterr().err == line


def test_a_command_ends_with_its_own_code() -> None:
    with pytest.raises(SystemExit) as stop:
        run_command(lambda _: 3)
    assert stop.value.code == 3
