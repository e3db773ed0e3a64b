"""The page and the figure of a study hold its points; sizes that it cannot use are refused.

Run: pytest tests/scripts/test_studies.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from model.commands.command_line import UserError
from scripts.replay.recording import RecordedTurn, Recording, Source
from scripts.replay.scores import Figures
from scripts.studies import command as studies_command
from scripts.studies.command import chart, main, page
from scripts.studies.lab import Point, Study

LINES = Study(
    "Does it draw?",
    "nodes",
    [Point(name, x, Figures(1 + x / 10, 1.0, x)) for name in "ab" for x in (1, 4, 16)],
)


def test_a_page_holds_every_point() -> None:
    text = page("lines", LINES, "tiny, float32", num_turns=7)
    assert text.startswith("# Does it draw?\n")
    assert "7 turns of tiny, float32" in text and "](lines.svg)" in text
    rows = [line for line in text.splitlines() if line.startswith(("| a", "| b"))]
    assert len(rows) == len(LINES.points)
    assert "2.60" in rows[2]


def test_a_chart_shows_every_series() -> None:
    figure = chart(LINES)
    (axes,), (legend,) = figure.axes, figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == list(dict.fromkeys(point.series for point in LINES.points))
    assert axes.get_xlabel() == LINES.varied
    assert list(axes.lines[1].get_xdata()) == [1, 4, 16]
    assert list(axes.lines[1].get_ydata()) == [1.1, 1.4, 2.6]


def test_rows_too_short_for_the_study_are_refused_first(tmp_path: Path) -> None:
    words = f"field --top-k 64 --model-path {tmp_path} --out {tmp_path / 'out'}"
    with pytest.raises(UserError, match="top_k: got 64; allowed: 65 or more"):
        main(words.split())
    assert not (tmp_path / "out").exists()


def test_rows_are_as_long_as_the_study_reads_where_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def note(args: argparse.Namespace) -> None:
        asked.append(args.top_k)
        raise UserError("enough")

    monkeypatch.setattr(studies_command, "record", note)
    for words in ("field", "field --top-k 70"):
        with pytest.raises(UserError, match="enough"):
            main([*words.split(), "--out", str(tmp_path)])
    assert asked == [65, 70]


def test_options_that_a_recording_has_are_refused(tmp_path: Path) -> None:
    words = f"field --recording {tmp_path / 'a.replay'} --num-questions 3"
    with pytest.raises(UserError, match="num_questions: got 3 with a recording"):
        main(words.split())


def test_a_single_question_is_refused_first(tmp_path: Path) -> None:
    words = f"field --num-questions 1 --model-path {tmp_path} --out {tmp_path / 'out'}"
    with pytest.raises(UserError, match="num_questions: got 1; allowed: 2 or more"):
        main(words.split())
    assert not (tmp_path / "out").exists()
    source = Source("model", "0", "float32", None, 100, 65, False, 4, (), "demo")
    turn = RecordedTurn(1, "any", None, (9, 5), (7, 3))
    Recording(source, [turn, turn]).save(tmp_path / "one.replay")
    with pytest.raises(UserError, match="num_questions: got 1; allowed: 2 or more"):
        main(["field", "--recording", str(tmp_path / "one.replay"), "--out", str(tmp_path / "o")])
