"""Comparisons with several questions at a time, and transformers' own batches as referees.

Run: pytest tests/evaluation/inference/test_compared_batches.py
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from evaluation import compare
from evaluation.answers.defects import row_flaws
from evaluation.answers.log import AnswerLog
from evaluation.answers.row import AnswerRow
from evaluation.inference import run as running
from model.commands.command_line import UserError
from tests.evaluation.conftest import cut_after, read_meta, read_rows, run, token_ids


def compared(given: list[str], folder: Path, *methods: str, size: int = 3) -> dict[str, Path]:
    """Compare methods in batches; return the answer files by participant."""
    more = ["--out", str(folder), "--batch-size", str(size), "--methods", *methods]
    assert compare.main([*given, *more]) == 0
    end = "-float32-temp-0.0-12" + (f"-batch-{size}" if size > 1 else "") + ".jsonl"
    return {
        file.name.removeprefix("tiny-").removesuffix(end): file for file in folder.glob("*" + end)
    }


def test_a_comparison_of_batches_answers_as_one_by_one(
    few: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    append = AnswerLog.append

    def noted(log: AnswerLog, *given: Any) -> None:
        names.append(log.file.name)
        append(log, *given)

    monkeypatch.setattr(AnswerLog, "append", noted)
    alone = tmp_path / "alone.jsonl"
    assert run("vanilla", few, alone, "--shuffle", "0") == 0
    names.clear()
    files = compared(few, tmp_path / "compared", "vanilla", "recycling", "generate")
    assert set(files) == {"vanilla", "vanilla-again", "recycling", "generate"}
    for participant, file in files.items():
        assert token_ids(file) == token_ids(alone), participant
        assert read_meta(file)["batch_size"] == 3
        assert not any(row_flaws([AnswerRow.of(row) for row in read_rows(file)])), participant
        choices = [row["choices"][0] for row in read_rows(file)]
        assert all(0 < sum(one["share_time"]) <= sum(one["wall_time"]) for one in choices)
    blocks = [(name, len(list(rows))) for name, rows in itertools.groupby(names)]
    assert [count for _, count in blocks] == [3, 3, 3, 3, 2, 2, 2, 2]


def test_a_cut_comparison_of_batches_goes_on(few: list[str], tmp_path: Path) -> None:
    alone = tmp_path / "alone.jsonl"
    assert run("vanilla", few, alone, "--shuffle", "0") == 0
    folder = tmp_path / "compared"
    with cut_after(4):
        compared(few, folder, "vanilla", "pld")
    files = compared(few, folder, "vanilla", "pld")
    assert len(files) == 3
    assert all(token_ids(file) == token_ids(alone) for file in files.values())


def test_transformers_continuous_batches_are_a_referee(few: list[str], tmp_path: Path) -> None:
    files = compared(few, tmp_path, "vanilla", "generate-batch", size=2)
    assert token_ids(files["generate-batch"]) == token_ids(files["vanilla"])
    for row in read_rows(files["generate-batch"]):
        (choice,) = row["choices"]
        assert 0 < sum(choice["share_time"]) <= sum(choice["wall_time"])


@pytest.mark.parametrize(
    ("size", "method", "more", "says"),
    [
        ("0", "pld", "", "batch_size: got 0; allowed: 1 or more"),
        ("2", "recycling-averaged --start cold", "", "batch_size: got 2 with a cold start"),
        ("2", "generate-pld", "", "batch_size: got 2 with generate-pld, which is for one text"),
        ("1", "generate-batch", "", "batch_size: got 1 with generate-batch; allowed: 2 or more"),
        ("2", "generate-batch", "--temperature 1", "temperature: got 1.0 with generate-batch"),
    ],
)
def test_what_batches_cannot_do_is_refused_before_the_weights_load(
    size: str,
    method: str,
    more: str,
    says: str,
    few: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "load_target", lambda *_: pytest.fail("it was loaded"))
    given = [*few, "--out", str(tmp_path), *more.split(), "--batch-size", size]
    with pytest.raises(UserError, match=says):
        compare.main([*given, "--methods", "vanilla", method])
