"""A method of another package takes part in laws, commands and library, as docs/adding-a-method.md says.

Run: pytest tests/model/methods/test_other_packages.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from evaluation import compare
from evaluation.inference.command import participant_of
from model import SpeculativeDecoder
from model import methods as registry
from model.chat import __main__ as chat
from model.commands.command_line import UserError
from model.methods import METHODS, find_method

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "adding-a-method.md"
DEMO = ROOT / "data" / "demo" / "model"
CLASS = "echo_method.drafter:EchoDrafter"
LAWS = (
    *("tests/model/engine/test_decoder_and_model.py", "tests/model/engine/test_rules.py"),
    *("tests/model/test_options.py", "tests/evaluation/inference/test_command.py"),
    "tests/model/methods/test_siblings.py",
)


def install(folder: Path, entry_points: str) -> Path:
    """Install the page's drafter as the package `echo-method`; return the folder."""
    page = PAGE.read_text(encoding="utf-8")
    package, info = folder / "echo_method", folder / "echo_method-1.0.dist-info"
    for path in (package, info):
        path.mkdir(parents=True)
    for name in ("__init__.py", "drafter.py"):
        found = re.search(rf"# model/methods/echo/{name}\n(.*?)^```$", page, re.M | re.S)
        assert found
        text = found[1].replace("from ...", "from token_recycling.")
        (package / name).write_text(text, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-method\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = PAGE.read_text(encoding="utf-8")
    found = re.search(r'^\[project\.entry-points\."(.*?)"\]\n(\w+) = "(.*?)"$', page, re.M)
    assert found and found[3] == CLASS
    return install(tmp_path_factory.mktemp("site"), f"[{found[1]}]\n{found[2]} = {found[3]}\n")


@pytest.fixture
def imported(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package in this process."""
    monkeypatch.syspath_prepend(installed)
    registry._other_packages.cache_clear()
    yield
    registry._other_packages.cache_clear()


@pytest.fixture
def clashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package whose method has the name of one here."""
    folder = install(tmp_path, f"[token_recycling.methods]\npld = {CLASS}\n")
    monkeypatch.syspath_prepend(folder)
    registry._other_packages.cache_clear()
    yield
    registry._other_packages.cache_clear()


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the checkout, with the packages of a folder."""
    command, paths = [sys.executable, *words], {"PYTHONPATH": str(folder)}
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, check=False
    )


def test_it_keeps_the_laws(installed: Path) -> None:
    done = run(*(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "echo"), *LAWS)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) >= 10, done.stdout[-5000:]


def test_a_comparison_takes_it_by_name_and_by_class(imported: None, tmp_path: Path) -> None:
    options = "--question-end=1 --max-new-tokens=8 --warmup=0 --threads=1"
    methods = ("vanilla", "echo", f"{CLASS} --length 2")
    assert compare.main(["--methods", *methods, "--out", str(tmp_path), *options.split()]) == 0
    texts = [
        json.loads(file.read_text())["choices"][0]["turns"] for file in tmp_path.glob("*.jsonl")
    ]
    assert len(texts) == 4, "the three, and vanilla again"
    assert texts.count(texts[0]) == 4


@pytest.mark.parametrize("method", ["echo", CLASS])
def test_the_library_takes_it_by_name_and_by_class(method: str, imported: None) -> None:
    decoder = SpeculativeDecoder.from_pretrained(DEMO, method=method, length=2)
    assert decoder.drafter.max_nodes == 3
    assert decoder.generate("USER: Hello. ASSISTANT:", max_new_tokens=8).token_ids


def test_tables_have_its_words_without_its_drafter(installed: Path) -> None:
    code = """
import sys
from evaluation.reporting.titles import method_title, options_text

print(method_title("echo"), options_text({"length": 2}, "echo"), "torch" in sys.modules)
"""
    assert run(installed, "-c", code).stdout == "Echo 2 guesses a step False\n"


def test_a_package_may_mean_something_else_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_other_packages", lambda: {"echo": CLASS})
    for found in (["an", "echo"], {"echo": "an echo"}):
        monkeypatch.setattr(registry, "_module_of", lambda *_, f=found: SimpleNamespace(WORDS=f))
        assert registry.words_of("echo").title == "echo"


def test_a_chat_takes_it(imported: None) -> None:
    words = f"--model-path {DEMO} --method {CLASS} --max-new-tokens 4 --threads 1 --prompt Hello"
    assert chat.run(words.split()) == 0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no_such_package.drafter:Drafter", "cannot be imported (ModuleNotFoundError: No module"),
        ("json:NoSuchDrafter", "json has no 'NoSuchDrafter'"),
        ("json:JSONDecoder", "which is not a Drafter; allowed: a subclass of "),
        (":Drafter", "cannot be imported (ValueError: Empty module name)"),
        ("json:", "json has no ''"),
        ("token_recycling.engine.drafter:Drafter", "has no config_class"),
    ],
)
def test_a_class_that_is_no_method_is_refused_in_one_line(name: str, error: str) -> None:
    for words in (name, f"{name} --length 3", f"{name}-auto"):
        with pytest.raises(UserError) as caught:
            participant_of(words)
        assert error.rstrip("'") in str(caught.value) or words.endswith("-auto")
        assert str(caught.value).startswith("method: got ") and "\n" not in str(caught.value)


def test_a_mistake_ends_a_command_with_one_line() -> None:
    with pytest.raises(UserError) as caught:
        compare.main(["--methods", "vanilla", "nosuch:Drafter"])
    said = str(caught.value)
    assert said.startswith("method: got 'nosuch:Drafter', but the module 'nosuch' ")
    assert "\n" not in said


@pytest.mark.usefixtures("clashing")
def test_a_name_of_two_methods_is_an_error_once_entry_points_are_read() -> None:
    assert find_method("pld").drafter_class.__module__ == "model.methods.pld.drafter"
    said = (
        "method: got 'pld' from the package echo-method; allowed: a name that no other method has"
    )
    for read in (lambda: list(METHODS), lambda: find_method("nosuch")):
        with pytest.raises(ValueError, match=re.escape(said)):
            read()
