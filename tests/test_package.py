"""The installed package: `token_recycling` alone, complete, and at work where there is no checkout.

Run: pytest tests/test_package.py
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from model import __version__
from model.chat import __main__ as chat
from model.kernels.short_pass import KINDS, short_pass_kernel
from scripts.export_custom_generate import export

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "data" / "demo" / "model"
PACKAGE = "token_recycling"
QUESTION = "Tell me about the sea."
PROMPT = f"USER: {QUESTION} ASSISTANT:"
BUILT_FROM = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"),
    *("CHANGELOG.md", "CITATION.cff", "SECURITY.md"),
)
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, f'build_{sys.argv[1]}')(sys.argv[2])"
# Of the files in the archives, as scripts/package.sh sets it.
TIME = "1700000000"
NEEDS_SETUPTOOLS = "packages are built by setuptools 77 or newer; pip install 'setuptools>=77'"

DECODE = f"""
import importlib.resources, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from {PACKAGE} import SpeculativeDecoder, TokenRecycling
assert importlib.resources.files("{PACKAGE}").joinpath("py.typed").is_file()
from {PACKAGE}.api.accelerate import recycling

path, prompt, exported = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(path)
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
expected = model.generate(**inputs, max_new_tokens=30)
length = inputs["input_ids"].shape[1]

decoder = TokenRecycling.from_pretrained(path, dtype=torch.float32)
assert decoder.generate(prompt, max_new_tokens=30).token_ids == expected[0, length:].tolist()
hybrid = SpeculativeDecoder(decoder.target, tokenizer, method="hybrid", budget="fixed")
assert hybrid.generate(prompt, max_new_tokens=30).token_ids == expected[0, length:].tolist()
given = model.generate(**inputs, max_new_tokens=30, custom_generate=recycling(tokenizer))
assert torch.equal(given, expected)
given = model.generate(
    **inputs, max_new_tokens=30, custom_generate=exported, trust_remote_code=True
)
assert torch.equal(given, expected)
"""
ALONE = """
import importlib.util
for name in ("model", "evaluation", "scripts", "tests"):
    assert importlib.util.find_spec(name) is None, f"{name} is found where there is no checkout"
"""
# The tokens of the one are those of the other, and what one registers is in no one's way.
BOTH = f"""
import shutil, sys, torch
from pathlib import Path
import {PACKAGE}, model
from {PACKAGE}.kernels import short_pass as first
from model.kernels import short_pass as second
assert model.TokenRecycling is not {PACKAGE}.TokenRecycling
if first.short_pass_kernel():
    second.kernel_library = lambda: Path(shutil.copy(first.kernel_library(), "another_build.so")).resolve()
    assert second.short_pass_kernel() == "another_build"
found = []
for package in ({PACKAGE}, model, {PACKAGE}):
    decoder = package.TokenRecycling.from_pretrained(sys.argv[1], dtype=torch.float32)
    found.append(decoder.generate(sys.argv[2], max_new_tokens=20).token_ids)
assert found[0] == found[1] == found[2]
"""


def run(
    python: Path | str, *words: object, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter in a folder, away from the checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python), *(str(word) for word in words)],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def run_python(python: Path | str, *words: object, cwd: Path, **environment: str) -> str:
    """Run an interpreter as `run`, with success; return its standard output."""
    done = run(python, *words, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path) -> Path:
    """Build wheel and source archive, from a copy of all that they need, since building leaves files there."""
    source, out = folder / "source", folder / "dist"
    out.mkdir()
    for name in ("model", "evaluation", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILT_FROM:
        shutil.copyfile(ROOT / name, source / name)  # with the time of now
    for kind in ("sdist", "wheel"):
        run_python(sys.executable, "-c", BUILD, kind, out, cwd=source, SOURCE_DATE_EPOCH=TIME)
    return out


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel and the source archive."""
    pytest.importorskip("setuptools", minversion="77", reason=NEEDS_SETUPTOOLS)
    return build(tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    """The wheel."""
    return next(archives.glob("*.whl"))


def install(folder: Path, *words: object) -> Path:
    """Install with these words of pip's into a fresh environment that has all other packages from this one.

    Returns its `bin` folder.
    """
    venv.create(folder)
    python = folder / "bin" / "python"
    code = "import site; print(site.getsitepackages()[0])"
    site = Path(run_python(python, "-c", code, cwd=folder).strip())
    elsewhere = [path for path in sys.path if path.endswith("-packages")]
    (site / "elsewhere.pth").write_text("\n".join(elsewhere) + "\n")
    pip = ("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", *words)
    run_python(sys.executable, *pip, cwd=folder)
    return folder / "bin"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the wheel."""
    return install(tmp_path_factory.mktemp("environment"), wheel)


def library_files() -> set[str]:
    """The library's files in the checkout, under the name of the package."""
    files = (file for file in (ROOT / "model").rglob("*") if file.is_file())
    return {
        f"{PACKAGE}/{file.relative_to(ROOT / 'model')}"
        for file in files
        if "__pycache__" not in file.parts
    }


def of_package(names: Iterable[str], metadata: str) -> set[str]:
    """The files of an archive that are no metadata."""
    return {name for name in names if not name.endswith("/") and metadata not in name}


def test_the_wheel_has_every_file_of_the_library_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        commands = next(name for name in names if name.endswith("entry_points.txt"))
        assert of_package(names, ".dist-info/") == library_files(), "is an __init__.py missing?"
        assert archive.read(commands).decode().split("\n")[1:] == [
            f"token-recycling = {PACKAGE}.__main__:main",
            "",
        ], "pipx run and uvx start the command that is called as the package"


def test_the_wheel_asks_for_what_the_library_imports_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    asked = [
        line for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    names = {re.split(r"\W", line.partition(": ")[2])[0] for line in asked}
    alone = (ROOT / "model/api/loading/quantised_gguf.py", ROOT / "model/api/expected.py")
    alone += (ROOT / "model/backends/fused/kernels.py",)  # Triton comes with torch on a GPU
    of_extras = (*alone, *(ROOT / "model/serve").glob("*.py"))
    files = [file for file in (ROOT / "model").rglob("*.py") if file not in of_extras]
    trees = [ast.parse(file.read_text()) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    types = [
        node
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    never_run = {inner for node in types for inner in ast.walk(node)}
    nodes = [node for node in nodes if node not in never_run]
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {
        str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level
    }
    others = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    # Transformers wants jinja2 for chat templates, and does not ask for it.
    assert names == others | {"jinja2"}


def test_the_source_archive_can_be_built_from(archives: Path) -> None:
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {name.replace(PACKAGE, "model", 1) for name in library_files()}
    assert names >= {*files, *BUILT_FROM}
    assert not any(name.startswith(("evaluation", "scripts", "tests")) for name in names)


def test_a_second_build_gives_the_same_bytes(archives: Path, tmp_path: Path) -> None:
    first, second = (
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in (archives, build(tmp_path))
    )
    assert len(first) == 2 and first == second


def test_what_is_said_of_the_version_is_true() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\S+)(?: \((\d{4}-\d\d-\d\d)\))?$", changes, re.MULTILINE)
    assert headings[0] == ("Unreleased", "") and headings[1][0] == __version__
    assert all(date for _, date in headings[1:])
    others = [ROOT / "pyproject.toml", ROOT / "CITATION.cff"]
    assert not any(__version__ in file.read_text(encoding="utf-8") for file in others), "one place"


def test_it_decodes_where_there_is_no_checkout(installed: Path, tmp_path: Path) -> None:
    export(tmp_path / "exported")
    words = ("-c", ALONE + DECODE, DEMO, PROMPT, tmp_path / "exported")
    code_cache = str(tmp_path / "modules")
    run_python(installed / "python", *words, cwd=tmp_path, HF_MODULES_CACHE=code_cache)


def test_both_names_serve_in_one_process(installed: Path, tmp_path: Path) -> None:
    run_python(installed / "python", "-c", BOTH, DEMO, PROMPT, cwd=tmp_path, PYTHONPATH=str(ROOT))


def test_the_commands_of_the_package_work_without_a_compiler_and_say_what_they_lack(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        lacking = {"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}
        return run(
            installed / "python", installed / "token-recycling", *words, cwd=tmp_path, **lacking
        )

    helped = command("serve", "--help").stdout
    assert (
        "token-recycling serve data" in helped and "--port" in helped and "python -m" not in helped
    )
    words = [f"--model-path={DEMO}", "--max-new-tokens=30", "--threads=1", f"--prompt={QUESTION}"]
    answer = command("chat", *words)
    assert chat.run(words) == 0
    assert answer.stdout == capsys.readouterr().out and answer.stdout.strip()
    assert "install g++" in answer.stderr
    told = json.loads(command("doctor", "--json").stdout)["findings"]
    advice = {finding["name"]: finding["advice"] for finding in told}
    assert "install g++" in advice["compiler"] and "--model-path" in advice["model"]
    assert {"torch", "[serve]", "[harness]"} <= {*advice}, "ranges are those of its metadata"
    refused = command("compare", "--methods", "vanilla")
    assert refused.returncode == 2 and "is in a checkout of the project" in refused.stderr


def test_a_wheel_of_a_platform_needs_no_compiler(archives: Path, tmp_path: Path) -> None:
    if short_pass_kernel() is None:
        pytest.skip("the kernels cannot be built here")
    made = {"SOURCE_DATE_EPOCH": TIME, "TOKEN_RECYCLING_PREBUILT": "1"}
    source = archives.parent / "source"
    run_python(sys.executable, "-c", BUILD, "wheel", tmp_path, cwd=source, **made)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if "/prebuilt/" in name]
    assert len([name for name in names if "short-pass" in name]) == len(KINDS)
    assert len(names) == len(KINDS) + 2
    installed = install(tmp_path / "environment", wheel)
    lacking = {"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}
    export(tmp_path / "exported")
    words = ("-c", ALONE + DECODE, DEMO, PROMPT, tmp_path / "exported")
    code_cache = str(tmp_path / "modules")
    done = run(installed / "python", *words, cwd=tmp_path, HF_MODULES_CACHE=code_cache, **lacking)
    assert done.returncode == 0 and "slower" not in done.stderr, done.stderr
    assert not (tmp_path / "none").exists()


def test_a_checkout_that_is_installed_in_place_has_the_harness(
    archives: Path, tmp_path: Path
) -> None:
    source = archives.parent / "source"
    folder = install(tmp_path, "--no-build-isolation", "--editable", source)
    words = ("compare", "--methods", "vanilla", "--runs", "0")
    done = run(folder / "python", folder / "token-recycling", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: runs: got 0; allowed: 1 or more\n")
