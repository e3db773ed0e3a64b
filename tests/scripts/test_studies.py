"""Every study runs, and says what it varies; figures and pages hold its points.

Run: pytest tests/scripts/test_studies.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from model.commands.command_line import UserError
from model.methods.growth.tree_template import TreeTemplate
from scripts.replay.recording import RecordedTurn, Recording, Source
from scripts.replay.scores import Figures
from scripts.studies import catalogue as studies_catalogue
from scripts.studies.catalogue import STUDIES, regular_tree
from scripts.studies.command import chart, main, page
from scripts.studies.lab import Point, Study
from scripts.studies.texts import made_up_questions

LINES = Study(
    "Does it draw?",
    "nodes",
    [Point(name, x, Figures(1 + x / 10, 1.0, x)) for name in "ab" for x in (1, 4, 16)],
)
BARS = Study("Bars?", "kind", [Point("a", x, Figures(2.0, 1.5, 3.0)) for x in ("one two", "three")])


def test_a_page_holds_every_point() -> None:
    text = page("lines", LINES, "tiny, float32", num_turns=7)
    assert text.startswith("# Does it draw?\n")
    assert "7 turns of tiny, float32" in text and "](lines.svg)" in text
    rows = [line for line in text.splitlines() if line.startswith(("| a", "| b"))]
    assert len(rows) == len(LINES.points)
    assert "2.60" in rows[2]


@pytest.mark.parametrize("study", [LINES, BARS])
def test_a_chart_shows_every_series(study: Study) -> None:
    (axes,) = chart(study).axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == list(dict.fromkeys(point.series for point in study.points))
    assert axes.get_xlabel() == study.varied
    if study is LINES:
        assert list(axes.lines[1].get_xdata()) == [1, 4, 16]
        assert list(axes.lines[1].get_ydata()) == [1.1, 1.4, 2.6]
    else:
        assert [bar.get_height() for bar in axes.patches] == [2.0, 2.0]


@pytest.mark.parametrize("breadth", [1, 2, 3, 32])
def test_regular_trees_have_the_nodes_asked_for(breadth: int) -> None:
    paths = regular_tree(breadth, 32)
    assert len(paths) == 32 == len(set(paths))
    TreeTemplate(paths, "regular").check_ranks(breadth)
    assert max(map(len, paths)) == {1: 32, 2: 5, 3: 3, 32: 1}[breadth]


def test_made_up_questions_are_the_same_every_time() -> None:
    assert made_up_questions() == made_up_questions()
    for kind, questions in made_up_questions().items():
        assert len({question.turns for question in questions}) == len(questions) > 1, kind


def test_an_unknown_study_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean shape") as error:
        main(["shapes", "--out", str(tmp_path)])
    assert all(name in str(error.value) for name in STUDIES)


@pytest.mark.parametrize(
    ("words", "least"),
    [("policy shape --top-k 12", 32), ("all --top-k 31", 32), ("text --top-k 7", 8)],
)
def test_rows_too_short_for_a_study_are_refused_first(
    words: str, least: int, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"top_k: got .*; allowed: {least} or more"):
        main([*words.split(), "--model-path", str(tmp_path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_single_question_is_refused_first(tmp_path: Path) -> None:
    words = f"policy --num-questions 1 --model-path {tmp_path} --out {tmp_path / 'out'}"
    with pytest.raises(UserError, match="num_questions: got 1; allowed: 2 or more"):
        main(words.split())
    assert not (tmp_path / "out").exists()
    source = Source("model", "0", "float32", None, 100, 32, False, 4, (), "demo")
    turn = RecordedTurn(1, "any", None, (9, 5), (7, 3))
    Recording(source, [turn, turn]).save(tmp_path / "one.replay")
    with pytest.raises(UserError, match="num_questions: got 1; allowed: 2 or more"):
        main(["policy", "--recording", str(tmp_path / "one.replay"), "--out", str(tmp_path / "o")])


def test_studies_run_on_a_recording_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studies_catalogue, "TEMPERATURES", (1.0,))
    given = f"--num-questions 2 --max-new-tokens 6 --top-k 12 --out {tmp_path / 'out'}"
    assert main(["policy", "temperature", *given.split()]) == 0
    written = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert written == ["policy.md", "policy.svg", "temperature.md", "temperature.svg"]
    text = (tmp_path / "out" / "policy.md").read_text()
    assert "| accepted last" in text and str(tmp_path) not in text
    assert "<svg" in (tmp_path / "out" / "policy.svg").read_text()
    assert '"study": "policy"' in capsys.readouterr().out
