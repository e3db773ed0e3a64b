"""Answers of several batch sizes: what counts as their seconds, and the table over batch sizes.

Run: pytest tests/evaluation/reporting/test_batch_sizes.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation import leaderboard, speed
from evaluation.answers.defects import Effect, row_flaws
from evaluation.scoring.per_question import question_frame
from tests.evaluation.answers.answer_rows import answer_rows, make_row, write_answers

META = {
    **{"model_path": "models/tiny", "dtype": "float32", "device": "cpu", "threads": 1},
    **{"max_new_tokens": 16, "temperature": 0.0, "bench_name": "spec_bench"},
}
Capture = pytest.CaptureFixture[str]

TABLE = """\
By batch size: models/tiny; Spec-Bench; float32; cpu, 1 thread

| Models                   | Batch size | Tokens/s | Over Vanilla (autoregressive) of that size | Over Vanilla (autoregressive) one by one |  MAT | Other answers | Texts under way |
| ------------------------ | ---------: | -------: | -----------------------------------------: | ---------------------------------------: | ---: | ------------: | --------------: |
| Prompt lookup (PLD)      |          1 |     4.00 |                         2.00x [2.00, 2.00] |                                    2.00x | 2.00 |        0 of 5 |            1.00 |
| Prompt lookup (PLD)      |          4 |     8.00 |                         1.33x [1.33, 1.33] |                                    4.00x | 2.00 |        0 of 5 |            3.50 |
| Vanilla (autoregressive) |          1 |     2.00 |                                      1.00x |                                    1.00x | 1.00 |             - |            1.00 |
| Vanilla (autoregressive) |          4 |     6.00 |                                      1.00x |                                    3.00x | 1.00 |             - |            4.00 |
"""  # noqa: E501


def write(
    folder: Path, method: str, accepted: int, wait: float, share: float | None = None, **meta: Any
) -> Path:
    """Write five answers of 12 tokens each, which a user waited for, and that took a share of the run."""
    shared = {} if share is None else {"share_time": [share]}
    rows = [
        make_row(number, "qa", [accepted] * (12 // accepted), wait, **shared) for number in range(5)
    ]
    name = "-".join(map(str, (method, *meta.values())))
    return write_answers(folder / f"{name}.jsonl", rows, META | {"method": method} | meta)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Vanilla and prompt lookup, one by one and in batches of four."""
    return [
        write(tmp_path, "vanilla", 1, 6.0),
        write(tmp_path, "pld", 2, 3.0, batch_size=1),
        write(tmp_path, "vanilla", 1, 8.0, 2.0, batch_size=4),
        write(tmp_path, "pld", 2, 5.25, 1.5, batch_size=4),
    ]


def report(paths: list[Path], capsys: Capture) -> tuple[str, dict[str, Any]]:
    """Return the leaderboard's tables, and its line of JSON."""
    assert leaderboard.main([*map(str, paths), "--json", "-"]) == 0
    text, line = capsys.readouterr().out.removesuffix("\n").rsplit("\n", 1)
    return text, json.loads(line)


def test_the_seconds_of_an_answer_are_its_share_of_the_run() -> None:
    rows = answer_rows(
        [make_row(1, "qa", [2, 2], 8.0, share_time=[2.0]), make_row(2, "qa", [2, 2], 3.0)]
    )
    frame = question_frame(rows)
    assert frame["seconds"].tolist() == frame["first_seconds"].tolist() == [2.0, 3.0]


def test_a_share_that_is_none_is_a_defect() -> None:
    flaws = row_flaws(
        answer_rows(
            [
                make_row(1, "qa", [2], 8.0, share_time=[0.0]),
                make_row(2, "qa", [2], 8.5, share_time=[1.0, 1.0]),
            ]
        )
    )
    assert [[flaw.effect for flaw in found] for found in flaws] == [
        [Effect.UNUSABLE],
        [Effect.UNSOUND],
    ]


def test_turns_of_a_batch_may_end_together() -> None:
    alike = [make_row(number, "qa", [2, 2], 3.14159, share_time=[1.5]) for number in (1, 2)]
    assert row_flaws(answer_rows(alike)) == [[], []]
    alone = [make_row(number, "qa", [2, 2], 3.14159) for number in (1, 2)]
    assert row_flaws(answer_rows(alone)) != [[], []]


def test_each_batch_size_has_its_own_baseline(files: list[Path], capsys: Capture) -> None:
    text, found = report(files, capsys)
    assert text.endswith(TABLE.rstrip())
    assert "greedy, at most 16 new tokens a turn, batches of 4 texts;" in text
    figures = {
        (row["method"], row["batch_size"]): (row["exact_speedup"], row["texts_under_way"])
        for row in found["measured"]
    }
    assert figures == {
        ("vanilla", "1"): (1, 1),
        ("pld", "1"): (2, 1),
        ("vanilla", "4"): (1, 4),
        ("pld", "4"): (pytest.approx(4 / 3), 3.5),
    }


def test_without_answers_one_by_one_that_column_is_left_out(
    files: list[Path], capsys: Capture
) -> None:
    text, _ = report(files[2:], capsys)
    assert "By batch size" in text and "one by one" not in text


def test_answers_one_by_one_have_no_table_of_batch_sizes(
    files: list[Path], capsys: Capture
) -> None:
    assert "By batch size" not in report(files[:2], capsys)[0]


def test_every_format_has_the_table(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert leaderboard.main([*map(str, files), "--no-published", "--out", str(out)]) == 0
    for name in ("leaderboard.md", "leaderboard.tex", "leaderboard.html"):
        assert "By batch size" in (out / name).read_text(encoding="utf-8"), name


def test_published_figures_do_not_compare_with_batches(tmp_path: Path, capsys: Capture) -> None:
    folders = {size: tmp_path / str(size) for size in (1, 4)}
    for size, folder in folders.items():
        meta = {"model_path": "lmsys/vicuna-7b-v1.3", "batch_size": size}
        write(folder / "a", "vanilla", 1, 2.0, share=1.0, **meta)
    texts = {}
    for size, folder in folders.items():
        assert leaderboard.main(["--published", *map(str, folder.glob("a/**/*.jsonl"))]) == 0
        texts[size] = capsys.readouterr().out
    assert "of plain decoding of Vicuna-7B" in texts[1]
    assert "of plain decoding of Vicuna-7B" not in texts[4]


def test_speed_warns_of_another_batch_size(files: list[Path], capsys: Capture) -> None:
    pair = ["--file-path", str(files[3]), "--base-path", str(files[0])]
    assert speed.main(pair) == 0
    warned = capsys.readouterr().err
    assert "not measured under the same conditions: batch_size is 4 in" in warned
