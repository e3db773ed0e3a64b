"""The Python blocks of the documents that are marked as runnable do run.

A block that begins with ```python runnable is run, after those before it in the same document, in a
folder that has the demo model at `data/demo/model`.

Run: pytest tests/test_snippets.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/library.md", "docs/bank.md")
BLOCK = re.compile(r"^```python runnable\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program_of(text: str) -> str:
    """Return the runnable blocks of a document as one program, on the lines where they stand."""
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        code = block[1].splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the demo model."""
    (tmp_path / "data").mkdir()
    for name in ("demo", "bank"):
        (tmp_path / "data" / name).symlink_to(ROOT / "data" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_snippets_of_a_document_run(document: str, folder: Path) -> None:
    program = program_of((ROOT / document).read_text(encoding="utf-8"))
    assert "import " in program, f"{document} should have a runnable block"
    exec(compile(program, document, "exec"), {"__name__": "__main__"})


def test_a_snippet_that_is_wrong_fails_on_its_line() -> None:
    text = "Text.\n\n```python\n1 / 0\n```\n\n```python runnable\nx = 1\nassert x == 2\n```\n"
    program = program_of(text)
    with pytest.raises(AssertionError) as failure:
        exec(compile(program, "text.md", "exec"), {})
    assert failure.traceback[-1].lineno == text.split("\n").index("assert x == 2")
