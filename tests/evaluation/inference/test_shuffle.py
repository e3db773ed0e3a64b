"""`--shuffle SEED` asks the questions in another order, which is recorded and kept by a resumed run.

Run: pytest tests/evaluation/inference/test_shuffle.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evaluation.inference.config import QuestionOptions
from model.commands.command_line import UserError
from tests.evaluation.conftest import read_meta, read_rows, run, token_ids, write_rows


def test_orders_are_seeded_and_complete() -> None:
    numbers = range(50)
    assert QuestionOptions().in_order(numbers) == numbers
    first, second = (QuestionOptions(shuffle=seed).in_order(numbers) for seed in (1, 2))
    assert sorted(first) == sorted(second) == list(numbers)
    assert first != second and first != list(numbers)
    assert first == QuestionOptions(shuffle=1).in_order(numbers)


def test_a_shuffled_run_is_recorded_and_resumed(options: list[str], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    shuffled = [*options, "--start", "cold", "--max-new-tokens", "8", "--shuffle"]
    assert run("recycling", shuffled, whole, 1) == 0
    assert read_meta(whole)["shuffle"] == 1
    rows = read_rows(whole)
    ids = [row["question_id"] for row in rows]
    assert len(ids) > 3 and ids != sorted(ids)
    # The run as it is when it dies after two questions.
    write_rows(cut, rows[:2])
    shutil.copy(whole.with_suffix(".meta.json"), cut.with_suffix(".meta.json"))
    with pytest.raises(UserError, match="shuffle"):
        run("recycling", shuffled, cut, 2, "--model-id", rows[0]["model_id"])
    assert run("recycling", shuffled, cut, 1) == 0
    assert [row["question_id"] for row in read_rows(cut)] == ids
    assert token_ids(cut) == token_ids(whole)
