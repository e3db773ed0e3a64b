"""`--shuffle SEED` asks the questions in another order, which is recorded and kept by a resumed run.

A comparison is shuffled by a fixed seed unless asked otherwise; a single command keeps the file's order.

Run: pytest tests/evaluation/inference/test_shuffle.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evaluation import compare
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
    assert run("recycling-averaged", shuffled, whole, 1) == 0
    assert read_meta(whole)["shuffle"] == 1
    rows = read_rows(whole)
    ids = [row["question_id"] for row in rows]
    assert len(ids) > 3 and ids != sorted(ids)
    # The run as it is when it dies after two questions.
    write_rows(cut, rows[:2])
    shutil.copy(whole.with_suffix(".meta.json"), cut.with_suffix(".meta.json"))
    with pytest.raises(UserError, match="shuffle"):
        run("recycling-averaged", shuffled, cut, 2, "--model-id", rows[0]["model_id"])
    assert run("recycling-averaged", shuffled, cut, 1) == 0
    assert [row["question_id"] for row in read_rows(cut)] == ids
    assert token_ids(cut) == token_ids(whole)


def _orders(folder: Path, options: list[str], *more: str) -> dict[str, tuple[object, list[int]]]:
    """Compare two methods; return each file's recorded seed and the order of its questions."""
    given = [*options, "--max-new-tokens", "4", "--methods", "vanilla", "recycling", *more]
    assert compare.main([*given, "--out", str(folder)]) == 0
    return {
        file.stem: (read_meta(file)["shuffle"], [row["question_id"] for row in read_rows(file)])
        for file in folder.glob("*.jsonl")
    }


def test_a_comparison_is_shuffled_alike_for_all_methods_and_runs(
    options: list[str], tmp_path: Path
) -> None:
    found = _orders(tmp_path / "usual", options, "--runs", "2")
    assert len(found) == 6
    (usual,) = {(seed, tuple(ids)) for seed, ids in found.values()}
    ids = sorted(usual[1])
    assert usual == (0, tuple(QuestionOptions(shuffle=0).in_order(ids))) and list(usual[1]) != ids
    for more, seed in ((["--in-order"], None), (["--shuffle", "5"], 5)):
        asked = list(QuestionOptions(shuffle=seed).in_order(ids))
        others = _orders(tmp_path / str(seed), options, *more)
        assert all(one == (seed, asked) for one in others.values()), more
    with pytest.raises(UserError, match="in_order, shuffle: got both"):
        _orders(tmp_path / "both", options, "--in-order", "--shuffle", "0")
    with pytest.raises(UserError, match="shuffle 0, this run has None"):
        _orders(tmp_path / "usual", options, "--in-order", "--runs", "2")


def test_shards_of_a_comparison_are_parts_of_its_order(options: list[str], tmp_path: Path) -> None:
    (whole,) = {tuple(ids) for _, ids in _orders(tmp_path / "whole", options).values()}
    for index in (1, 2):
        parts = _orders(tmp_path / str(index), options, "--shard", f"{index}/2")
        assert all(tuple(ids) == whole[index - 1 :: 2] for _, ids in parts.values())
