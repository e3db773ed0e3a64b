"""How a command ends: one line on stderr and the exit code of the error.

Run: pytest tests/model/commands/test_command_line.py
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from model.commands.command_line import BROKEN_PIPE, OptionParser, UserError, run_command
from scripts.download_data import NetworkError
from tests.evaluation.conftest import ROOT


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


@pytest.mark.parametrize(
    "words", [["--name", ""], ["--name="], ["--names", "a", ""], ["--names", ""], ["--path", ""]]
)
def test_an_empty_value_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It would look like an option that was not given."""
    parser = OptionParser(prog="x")
    parser.add_argument("--name")
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--path", type=Path)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(words)
    assert stop.value.code == 2
    assert "got an empty text; give a value, or leave the option out" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = (
        "import model.commands.command_line as c; c.run_command(lambda _: print('x' * 10**6) or 0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == BROKEN_PIPE


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("length", [1, 10**6])
def test_a_full_disk_under_standard_output_is_one_line(length: int) -> None:
    command = f"import model.commands.command_line as c; c.run_command(lambda _: print('x' * {length}) or 0)"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", command],
            **{"stdout": full, "stderr": subprocess.PIPE, "cwd": ROOT, "text": True},
        )
    assert done.returncode == 2
    assert done.stderr == "error: cannot write: No space left on device; free some space\n"


def test_other_errors_of_files_are_errors() -> None:
    def main(argv: Sequence[str] | None) -> int:
        raise PermissionError("a file's")

    with pytest.raises(PermissionError, match="a file's"):
        run_command(main)


def test_other_broken_pipes_are_errors() -> None:
    def main(argv: Sequence[str] | None) -> int:
        raise BrokenPipeError("a worker's")

    with pytest.raises(BrokenPipeError, match="a worker's"):
        run_command(main)


def test_a_closed_standard_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(SystemExit) as stop:
        run_command(lambda _: 0)
    assert stop.value.code == 0


def test_a_command_ends_with_its_own_code() -> None:
    with pytest.raises(SystemExit) as stop:
        run_command(lambda _: 3)
    assert stop.value.code == 3


def test_every_option_says_what_it_is_for() -> None:
    sources = [
        file
        for room in ("model", "evaluation", "scripts")
        for file in ROOT.joinpath(room).rglob("*.py")
    ]
    calls = [
        (file, call)
        for file in sources
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
    ]
    assert len(calls) > 50
    for file, call in calls:
        keywords = {keyword.arg for keyword in call.keywords}  # None: `**options`
        assert keywords & {"help", None}, f"{file}:{call.lineno}: an option without help"


def test_output_that_the_terminal_cannot_show_is_shown_as_escapes() -> None:
    code = "import model.commands.command_line as c; c.run_command(lambda _: print('2\\xd7') or 0)"
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=ascii_only, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"2\\xd7\n", b"")


def test_ctrl_c_during_imports_is_no_traceback(tmp_path: Path) -> None:
    interrupt = "import os, signal\nsignal.raise_signal(signal.SIGINT)\n"
    (tmp_path / "pandas.py").write_text(interrupt)
    take = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    take += "os.execv(sys.executable, [sys.executable, '-m', 'evaluation.speed'])"
    done = subprocess.run(
        [sys.executable, "-c", take],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_a_program_that_imports_the_harness_keeps_its_ctrl_c() -> None:
    code = "import signal; before = signal.getsignal(2); import evaluation, scripts; "
    code += "assert signal.getsignal(2) == before"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
