"""The examples run and say what they promise; notebooks run cell by cell, without Jupyter.

Run: pytest tests/examples
"""

from __future__ import annotations

import json
import runpy
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model import SpeculativeDecoder
from model import methods as registry
from model.machine.packages import answer_to_installed_name

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROMPT = "USER: Write a song about the sea, the sea and the sea. ASSISTANT:"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(name: str) -> None:
    """Run an example as a user does who has installed the package."""
    answer_to_installed_name()
    runpy.run_path(str(EXAMPLES / name))["main"]()


def run_notebook(name: str, **parameters: Any) -> dict[str, Any]:
    """Run the cells of a notebook; parameters replace those of its cell of parameters.

    Cells with the tag "setup" are left out: they set up a fresh machine.
    """
    cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        tags = cell["metadata"].get("tags", ())
        if cell["cell_type"] == "code" and "setup" not in tags:
            assert cell["outputs"] == [] and cell["execution_count"] is None, "store no outputs"
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
        if "parameters" in tags:
            assert parameters.keys() <= names.keys()
            names |= parameters
    return names


def test_every_example_is_listed_and_tested() -> None:
    tested, listed = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    for file in EXAMPLES.iterdir():
        if file.name != "README.md" and not file.name.startswith(("_", ".")):
            assert f"({file.name}" in listed and f'"{file.name}"' in tested, file.name


def test_token_recycling_from_scratch_equals_generate(capsys: pytest.CaptureFixture[str]) -> None:
    source = (EXAMPLES / "from_scratch.py").read_text(encoding="utf-8")
    imports = {
        line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))
    }
    assert imports == {"sys", "pathlib", "torch", "transformers"}, "nothing of this project"
    run("from_scratch.py")
    said = capsys.readouterr().out
    assert said.count("equal to generate: True") == 3
    rates = [float(line.split()[-4]) for line in said.splitlines() if "tokens a step" in line]
    assert len(rates) == 3 and min(rates) > 1.4 and rates[2] > rates[0], "it learns"


def test_a_stream_has_steps_of_several_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    run("stream.py")
    said = capsys.readouterr().out
    assert max(json.loads(said.partition("tokens of each step: ")[2])) > 1


def test_existing_code_gets_the_tokens_of_generate(capsys: pytest.CaptureFixture[str]) -> None:
    run("existing_code.py")
    assert "equal to generate: True" in capsys.readouterr().out


def test_a_batch_answers_every_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    run("batch.py")
    assert "64 texts, " in capsys.readouterr().out


@pytest.fixture
def installed_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example's package as pip installs it; return the method's name."""
    package = EXAMPLES / "own_method"
    table = (package / "pyproject.toml").read_text().partition('points."')[2]
    group, _, points = table.partition('"]\n')
    info = tmp_path / "successor_chain-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: successor-chain\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}".replace('"', ""))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(package)
    registry._other_packages.cache_clear()
    yield points.partition(" ")[0]
    registry._other_packages.cache_clear()


def test_an_own_method_takes_part_by_its_name(installed_method: str) -> None:
    (EXAMPLES / "own_method" / "pyproject.toml").stat()
    demo = ROOT / "data" / "demo" / "model"
    options = {"dtype": torch.float32, "method": installed_method, "length": 3}
    decoder = SpeculativeDecoder.from_pretrained(demo, **options)
    assert decoder.drafter.max_nodes == 4
    output = decoder.generate(PROMPT, max_new_tokens=60)
    plain = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, method="vanilla")
    assert output.token_ids == plain.generate(PROMPT, max_new_tokens=60).token_ids
    assert max(output.accept_lengths) > 1


def test_the_notebook_compares_and_reads_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)  # where Jupyter starts
    out = str(tmp_path / "out")
    names = run_notebook("compare.ipynb", NUM_QUESTIONS=2, MAX_NEW_TOKENS=16, WARMUP=1, OUT=out)
    table = names["table"].set_index("method")
    assert set(table.index) == {"vanilla", "pld", "recycling"}
    assert table["MAT"]["vanilla"] == 1 < table["MAT"]["recycling"]
    assert (table["other answers"].dropna() == 0).all()
    assert names["shares"].shape == (3, 6) and len(names["by_task"]) == 2
    assert (tmp_path / "out" / "report" / "leaderboard.html").is_file()


def test_the_gpu_notebook_leaves_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    few = {"PARTS": ["device"], "METHODS": ["vanilla", "pld"], "NUM_QUESTIONS": 1, "WARMUP": 0}
    out = str(tmp_path / "gpu")
    names = run_notebook("gpu.ipynb", DEVICE="simulated", MAX_NEW_TOKENS=8, OUT=out, **few)
    assert (names["check_code"], names["compare_code"]) == (0, 0)
    bundle = zipfile.ZipFile(tmp_path / "gpu-bundle.zip")
    assert {"gpu.json", "answers.tar.xz", "report/leaderboard.html"} <= set(bundle.namelist())
    report = json.loads(bundle.read("gpu.json"))
    assert report["parts"]["device"]["status"] == "passed"
