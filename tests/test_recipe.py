"""The recipe of docs/adding-a-method.md, followed word for word in a copy of the checkout, passes every check.

Run: pytest tests/test_recipe.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A block begins with the file that it is, or the table that it is a line of.
BLOCK = re.compile(
    r"^```python\n# (\S+?\.py)(, in (\w+).*?)?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
# Laws of drafters, of the loop and of the library, its options and its command, the rules of imports, and the
# wheel's files. All laws of every method are in the files that are parametrised over the registry.
LAWS = (
    *("tests/model/engine/test_drafter.py", "tests/model/engine/test_loop.py"),
    *("tests/model/engine/test_rules.py", "tests/model/api/test_decoder.py"),
    *("tests/model/test_options.py", "tests/evaluation/inference/test_command.py"),
    *("tests/test_import_rules.py", "tests/test_package.py"),
    *("tests/model/api/test_face.py", "tests/evaluation/reporting/test_titles.py"),
)
CHOSEN = (
    "echo or test_import_rules or test_the_wheel_has_every_file or test_an_editor or test_titles"
)


def run(folder: Path, *words: str) -> str:
    """Run a Python module in the copy; return what it said."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which the recipe has been followed."""
    folder = tmp_path_factory.mktemp("recipe")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the files to copy are those that git knows, and this is no checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    follow_recipe(folder)
    return folder


def follow_recipe(folder: Path) -> None:
    """Write the files of the page's blocks, and the lines of the registry as the last of their tables."""
    page = (ROOT / "docs" / "adding-a-method.md").read_text(encoding="utf-8")
    section = page.partition("## In this repository\n")[2].partition("\n## ")[0]
    blocks = BLOCK.findall(section)
    assert len(blocks) == section.count("```python"), "each block names its file in its first line"
    assert "model/methods/__init__.py" in {name for name, *_ in blocks}
    for name, _, table, content in blocks:
        file = folder / name
        if table:
            text = file.read_text(encoding="utf-8")
            head, found, rest = text.partition(f"\n{table}")
            end = re.search(r"^[\]}]", rest, re.MULTILINE)
            assert found and end, f"{name} has no table {table}"
            content = f"{head}{found}{rest[: end.start()]}{content}{rest[end.start() :]}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")


def test_the_linters_find_nothing(copy: Path) -> None:
    run(copy, "ruff", "check", "--no-cache", ".")
    run(copy, "ruff", "format", "--no-cache", "--check", ".")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="its newest numpy has other types")
def test_the_types_are_right(copy: Path) -> None:
    run(copy, "mypy", "--cache-dir", str(ROOT / ".mypy_cache"))


def test_the_method_keeps_the_laws_and_is_in_the_package(copy: Path) -> None:
    said = run(copy, "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN, *LAWS)
    passed = re.search(r"(\d+) passed", said)
    assert passed and int(passed[1]) > 30, said


def test_its_command_answers(copy: Path) -> None:
    answers = copy / "answers.jsonl"
    options = "--length 2 --question-end 1 --max-new-tokens 16 --warmup 0 --threads 1"
    run(copy, "evaluation.inference", "echo", *options.split(), "--answer-file", str(answers))
    assert len(answers.read_text(encoding="utf-8").splitlines()) == 1
