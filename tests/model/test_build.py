"""The build command: all C++ of the library is there after it, or one line says why not.

Run: pytest tests/model/test_build.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from model import build
from model.budget import best_first
from model.commands.command_line import UserError
from model.kernels import short_pass
from model.methods.hybrid.candidate_pool import library_of_pool
from model.methods.recycling.auto_tree import library_of_guesses

ROOT = Path(__file__).resolve().parents[2]
needs_kernel = pytest.mark.skipif(
    short_pass.short_pass_kernel() is None, reason="no compiler, or another processor"
)


@needs_kernel
def test_after_it_no_process_compiles_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.run([]) == 0
    lines = capsys.readouterr().out.splitlines()
    files = [Path(line.split("  ")[-1]) for line in lines]
    assert all(file.is_file() for file in files)
    sources = {file.stem.replace("_", "-") for file in (ROOT / "model").rglob("*.cpp")}
    assert {file.stem.rpartition("-")[0] for file in files} == sources
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    assert short_pass.short_pass_kernel.__wrapped__()
    assert library_of_pool.__wrapped__() and library_of_guesses.__wrapped__()


@needs_kernel
def test_without_a_compiler_one_line_says_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    with pytest.raises(UserError, match=r"^kernels .*: no C\+\+ compiler: .*; install g\+\+, or "):
        build.run([])


def test_another_processor_needs_no_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    library = tmp_path / "library.so"
    library.touch()
    monkeypatch.setattr(best_first, "built", lambda *words: library)
    assert build.run([]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("left out  kernels for passes over a few rows: processor: got DEFAULT")
    assert [line[:8] for line in others] == ["built in"] * 2


def test_its_help_has_examples() -> None:
    words = [sys.executable, "-m", "model.build", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "python -m model.build\n" in done.stdout
