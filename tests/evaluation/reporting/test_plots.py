"""The pictures: what they show is what the answers say, and no word of one covers another.

Run: pytest tests/evaluation/reporting/test_plots.py
"""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

from evaluation.leaderboard import main
from evaluation.reporting import charts
from evaluation.reporting.charts import Picture
from evaluation.reporting.pictures import group_pictures
from evaluation.reporting.titles import entry_titles
from evaluation.scoring.comparable import group_answers, load_answers
from model.commands.command_line import UserError
from tests.evaluation.answers.answer_rows import failed_row, make_row, write_answers

METHODS = (
    *("pld", "lookahead", "samd (fallback=none)", "samd (fallback=recycling)"),
    *("recycling (start=cold, tree_version=2.2.2)", "recycling (start=hot, tree_version=2.2.2)"),
    *("hybrid", "_$odd$ <name>"),
)
TASKS = (
    "qa",
    "rag",
    "summarization",
    "translation",
    "math_reasoning",
    "mt_bench",
    "code",
    "overall",
)
META: dict[str, Any] = {"model_path": "models/tiny", "bench_name": "spec_bench"}


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """Answers of a baseline and of hot and cold drafts, with counts of nodes; one question failed."""
    folder = tmp_path / "answers"
    drafts: dict[str, Any] = {"drafted": [[[4, 4], [3]]], "accepted": [[[2, 1], [1]]]}
    speeds = {"vanilla": 1.0, "hot": 2.0, "cold": 1.5}
    for name, speed in speeds.items():
        keys = {} if name == "vanilla" else drafts
        lengths = [1] * 8 if name == "vanilla" else [1, 3, 2, 2]
        rows = [
            make_row(1, "qa", lengths, 8 / speed, **keys),
            make_row(2, "qa", lengths, 8 / speed**2, **keys),
            failed_row(3, "qa") if name == "hot" else make_row(3, "qa", lengths, 8.0, **keys),
            make_row(4, "code", [1] * 8, 8.0),
            *(make_row(number, "qa", lengths, number / speed, **keys) for number in (5, 6, 7)),
        ]
        options = {} if name == "vanilla" else {"start": name}
        meta = META | {
            "method": "vanilla" if name == "vanilla" else "recycling",
            "options": options,
        }
        write_answers(folder / f"{name}.jsonl", rows, meta)
    return folder


def _pictures(folder: Path) -> dict[str, Picture]:
    files = [load_answers(path) for path in sorted(folder.glob("*.jsonl"))]
    (pictures,) = group_pictures(group_answers(files))
    return {picture.name: picture for picture in pictures}


def test_files_are_written(
    answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "plots"
    assert main([str(answers), "--pictures", str(out)]) == 0
    names = {"speedup", "accept-lengths", "tree-1", "tree-2", "warm-up"}
    files = {out / f"{name}.{ending}" for name in names for ending in ("png", "svg")}
    said = capsys.readouterr().err.splitlines()
    assert {
        Path(line.removeprefix("wrote ")) for line in said if line.startswith("wrote ")
    } == files
    assert set(out.iterdir()) == files
    for file in files:
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG")
        else:
            assert ElementTree.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    text = (out / "speedup.svg").read_text(encoding="utf-8")
    assert "Token Recycling (b: memory kept across" in text


def test_speedups_and_intervals_are_those_of_the_table(answers: Path) -> None:
    files = [load_answers(path) for path in sorted(answers.glob("*.jsonl"))]
    (group,) = group_answers(files)
    axes = _pictures(answers)["speedup"].figure.axes[0]
    marks = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
    bars = [it.lines[2][0] for it in axes.containers if isinstance(it, ErrorbarContainer)]
    drafting = [row for row in group.rows if row.entry is not group.baseline]
    titles = entry_titles(group)
    assert [titles[row.entry.label].long for row in drafting] == [
        "Token Recycling (b: memory kept across questions)",
        "Token Recycling (a: memory emptied before each question)",
    ]
    for row, (*_, overall) in zip(drafting, (it.get_segments() for it in bars), strict=True):
        expected = [row.figures.figure(task, "speedup") for task in group.tasks]
        assert marks[titles[row.entry.label].long] == pytest.approx(expected)
        assert overall[:, 0] == pytest.approx(row.figures.interval("overall", "speedup"))
        assert overall[0, 0] < overall[1, 0]
    assert [it.get_text() for it in axes.get_yticklabels()] == ["QA", "Code", "Overall"]


def test_histogram_leaves_out_failures_but_no_code_of_ones_own(answers: Path) -> None:
    hot, cold = _pictures(answers)["accept-lengths"].figure.axes
    bars = next(it for it in hot.containers if isinstance(it, BarContainer))
    assert [bar.get_height() for bar in bars] == pytest.approx([1300 / 28, 1000 / 28, 500 / 28])
    name = "Token Recycling (b: memory kept across questions):\nmean 1.71"
    assert hot.get_title(loc="left") == name
    assert cold.get_title(loc="left").endswith("mean 1.75")


def test_warm_up_runs_over_the_questions_in_order(answers: Path) -> None:
    picture = _pictures(answers)["warm-up"]
    hot, cold = picture.figure.axes[0].get_lines()[:2]
    # 8 tokens in 4 steps a question, none in the one that failed, 8 in 8 steps of code.
    assert hot.get_ydata() == pytest.approx([2, 2, 2, 24 / 16, 32 / 20, 40 / 24, 48 / 28])
    assert cold.get_ydata() == pytest.approx([2, 2, 2, 32 / 20, 40 / 24, 48 / 28, 56 / 32])
    assert (hot.get_linestyle(), cold.get_linestyle()) == ("-", "--")


def test_warm_up_pools_runs_and_leaves_out_defects(tmp_path: Path) -> None:
    write_answers(
        tmp_path / "vanilla.jsonl", [make_row(1, "qa", [1], 1.0)], META | {"method": "vanilla"}
    )
    for name, second in (("a", make_row(2, "rag", [2, 2], 1.0)), ("b", failed_row(2, "rag"))):
        broken = make_row(
            3, "rag", [9, 9], 1.0, new_tokens=[1]
        )  # steps bring more than was counted
        rows = [make_row(1, "qa", [3, 1], 1.0), second, broken, make_row(4, "rag", [4], 1.0)]
        write_answers(tmp_path / f"{name}.jsonl", rows, META | {"method": "pld"})
    axes = _pictures(tmp_path)["warm-up"].figure.axes[0]
    expected = [8 / 4, 12 / 6, 12 / 6, 20 / 8]
    assert axes.get_lines()[0].get_ydata() == pytest.approx(expected)
    assert [it.get_text() for it in axes.texts] == ["QA", "RAG"]


def test_tree_shares_are_of_steps_that_draft(answers: Path) -> None:
    axes = _pictures(answers)["tree-1"].figure.axes[0]
    dots = [it for it in axes.collections if isinstance(it, PathCollection)][-1]
    assert dots.get_offsets().tolist() == [[1, 1], [1, 2], [2, 1]]
    assert list(dots.get_array()) == [50, 25, 25]


@pytest.fixture(scope="module")
def crowded() -> list[Figure]:
    """Every chart with eight methods, long and odd names, and eight tasks; trees of any shape."""
    return list(_crowded())


def _crowded() -> Iterator[Figure]:
    look = charts.looks(METHODS)
    lines = [
        (method, task, 0.6 + 0.3 * place, 0.5 + 0.3 * place, 0.8 + 0.3 * place)
        for task in TASKS
        for place, method in enumerate(METHODS)
    ]
    frame = pd.DataFrame(lines, columns=["method", "task", "speedup", "low", "high"])
    yield charts.speedup_chart(frame, "vanilla", look)
    yield charts.accept_length_chart({method: [1, 1, 2, 40] for method in METHODS}, look)
    tasks = [task for task in TASKS[:7] for _ in range(10)]
    curves = {method: [1.0 + place] * 70 for place, method in enumerate(METHODS)}
    yield charts.warm_up_chart(curves, METHODS[:1], tasks, look)
    for num_depths, num_ranks in ((1, 1), (6, 8), (40, 8), (5, 64)):
        places = itertools.product(range(1, num_depths + 1), range(num_ranks))
        nodes = pd.DataFrame(places, columns=["depth", "rank"]).assign(drafted=5, accepted=3)
        yield charts.tree_chart(nodes)


@pytest.mark.parametrize("place", range(7))
def test_words_do_not_cover_each_other(place: int, crowded: list[Figure]) -> None:
    assert _overlapping(crowded[place]) == []


@pytest.mark.parametrize("place", range(3))
def test_every_method_is_named(place: int, crowded: list[Figure]) -> None:
    words = " ".join(it.get_text() for it in crowded[place].findobj(Text))
    assert [method for method in METHODS if method not in words] == []


def test_words_that_cover_each_other_are_found() -> None:
    figure = Figure()
    figure.text(0.5, 0.5, "first")
    figure.text(0.5, 0.5, "second")
    assert _overlapping(figure) == [("first", "second")]


def _overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes overlap, and texts that leave the figure, beside nothing."""
    with matplotlib.rc_context(charts.STYLE):
        FigureCanvasAgg(figure).draw()
    texts = [
        it
        for it in figure.findobj(Text)
        if it.get_visible() and it.get_text().strip() and it not in _unseen_ticks(figure)
    ]
    # A rotated text's box is larger than the text; only upright ones are told by their boxes.
    boxes = [
        (it.get_text(), it.get_window_extent()) for it in texts if it.get_rotation() in (0, 90)
    ]
    found = [
        (name, other)
        for (name, box), (other, other_box) in itertools.combinations(boxes, 2)
        if box.shrunk(0.95, 0.95).overlaps(other_box)
    ]
    outside = [
        (name, "")
        for name, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > figure.bbox.x1 + 1 or box.y1 > figure.bbox.y1 + 1
    ]
    return found + outside


def _unseen_ticks(figure: Figure) -> set[Text]:
    """Labels of ticks beyond the ends of an axis, which are not drawn."""
    return {
        tick.label1
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }


def test_methods_are_told_apart_without_colour_and_alike_everywhere() -> None:
    look = charts.looks(METHODS)
    assert len({it.marker for it in look.values()}) == len({it.color for it in look.values()}) == 8
    assert charts.looks(METHODS[::-1]) == look


def test_names_are_shown_as_they_stand() -> None:
    svg = charts.svg_text(
        charts.accept_length_chart({METHODS[-1]: [1, 2]}, charts.looks(METHODS)), "a"
    )
    assert "_$odd$ &lt;name&gt;: mean 1.50" in svg
    assert 'id="a-' in svg
    ElementTree.fromstring(svg)


def test_a_file_in_the_way_is_one_line(answers: Path, tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("in the way")
    with pytest.raises(UserError, match="cannot make"):
        main([str(answers), "--pictures", str(tmp_path / "plots")])
