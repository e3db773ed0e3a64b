"""The map of batches: what is measured is what is drawn.

Run: pytest tests/scripts/test_batch_map.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.commands.command_line import UserError
from scripts.batch_map.command import main
from scripts.batch_map.measure import ENTRANTS, Run, prompts_of
from scripts.batch_map.page import border, ratios

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A file of runs of the demo model: batches of one and two texts."""
    out = tmp_path / "map.json"
    few = ["--contexts", "16", "--batch-sizes", "1", "2", "--steps", "4", "--rounds", "1"]
    assert main(["measure", *few, "--out", str(out)]) == 0
    return out


def test_every_method_is_measured_at_every_size_and_drawn(measured: Path, tmp_path: Path) -> None:
    found = json.loads(measured.read_text())
    runs = [Run(**run) for run in found["runs"]]
    assert {(run.method, run.batch_size) for run in runs} == {
        (name, size) for name in ENTRANTS for size in (1, 2)
    }
    for run in runs:
        # Four texts of four steps, in batches of one or two.
        assert run.steps * run.batch_size == 16 and run.tokens >= 16, "a text has ended early"
        assert run.rows >= 16 and run.seconds > 0 and run.predicted > 0
    page, picture = tmp_path / "map.md", tmp_path / "map.svg"
    assert main(["draw", str(measured), "--page", str(page), "--picture", str(picture)]) == 0
    assert all(f"| {name} " in page.read_text() for name in ENTRANTS)
    assert picture.read_text().startswith("<svg") and "map.svg" in page.read_text()


def test_the_page_of_the_docs_is_drawn_from_the_stored_files(tmp_path: Path) -> None:
    files = sorted(map(str, ROOT.glob("docs/benchmarks/batches-*.json")))
    page, picture = tmp_path / "batches.md", tmp_path / "batches.svg"
    assert main(["draw", *files, "--page", str(page), "--picture", str(picture)]) == 0
    assert page.read_text() == (ROOT / "docs/studies/batches.md").read_text()


def test_figures_are_relative_to_the_plain_batch_of_the_same_round() -> None:
    runs = [
        Run(128, 2, method, number, seconds, 10, 5, 10, 1.0)
        for method, number, seconds in (
            *(("vanilla", 1, 2.0), ("vanilla", 2, 4.0)),
            *(("pld", 1, 1.0), ("pld", 2, 4.0)),
        )
    ]
    assert ratios(runs, "pld", context=128, batch_size=2) == [2.0, 1.0]
    assert border([(1, 1.5), (2, 1.2), (4, 0.9)]) == "2 to 4"
    assert border([(1, 1.5), (2, 1.2)]) == "above 2"
    assert border([(1, 0.9), (2, 0.8)]) == "below 1"


def test_prompts_are_windows_of_the_pages_and_the_end_of_a_question() -> None:
    questions = [[90, 91], [92, 93], [94, 95, 96, 97, 98]]
    prompts = prompts_of(range(10), questions, length=4)
    assert prompts == [[0, 1, 90, 91], [3, 4, 92, 93], [95, 96, 97, 98]]


def test_too_few_questions_are_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "map.json")
    with pytest.raises(UserError, match=r"question_file: got 46 turns; allowed: 136 or more"):
        main(["measure", "--batch-sizes", "128", "--out", out])


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--batch-sizes", "0"], "batch_sizes: got 0"), (["--rounds", "0"], "rounds: got 0")],
)
def test_what_cannot_be_measured_is_refused(given: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        main(["measure", *given, "--out", str(tmp_path / "map.json")])


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("[]")
    with pytest.raises(UserError, match="was not written by measure"):
        main(["draw", str(file), "--page", "p.md", "--picture", "p.svg"])
