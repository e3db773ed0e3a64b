"""Acceptance over the age of the memory: the table's figures, whom it has, and its interval's coverage.

Run: pytest tests/evaluation/reporting/test_memory_age.py
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evaluation.leaderboard import main
from evaluation.reporting.memory_age import CAPTION, LAST, PARTS, growth_of, memory_table
from evaluation.scoring.comparable import group_answers, load_answers
from evaluation.scoring.groups import Group
from evaluation.scoring.intervals import LEAST_QUESTIONS, paired_interval
from tests.evaluation.answers.answer_rows import make_row, write_answers

META = {"model_path": "models/tiny", "bench_name": "spec_bench", "device": "cpu"}
TASKS = ("writing", "translation", "qa")
HOT = {"options": {"start": "hot"}}
NUM_QUESTIONS = 4 * LEAST_QUESTIONS + 4


def _write(folder: Path, method: str, lengths: list[int], tasks: list[str], **meta: Any) -> None:
    """Write answers of 12 tokens whose steps have this length, a question each, asked in this order."""
    rows = [
        make_row(100 - place, task, [length] * (12 // length), 1.0)
        | ({"questions_before": place // 2} if meta.get("merged_from") else {})
        for place, (length, task) in enumerate(zip(lengths, tasks, strict=True))
    ]
    write_answers(folder / f"{method}.jsonl", rows, META | {"method": method} | meta)


def _group(folder: Path) -> Group:
    (group,) = group_answers([load_answers(path) for path in sorted(folder.glob("*.jsonl"))])
    return group


def _shuffled(count: int) -> list[str]:
    tasks = [TASKS[place % 3] for place in range(count)]
    return random.Random(0).sample(tasks, count)


def test_the_table_has_each_quarter_of_methods_with_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = _shuffled(NUM_QUESTIONS)
    quarter = NUM_QUESTIONS // 4
    growing = [1] * quarter + [2] * quarter + [2, 3] * (quarter // 2) + [3] * quarter
    _write(tmp_path, "vanilla", [1] * NUM_QUESTIONS, tasks)
    _write(tmp_path, "recycling", growing, tasks, **HOT)
    _write(tmp_path, "suffix", [2] * NUM_QUESTIONS, tasks, options={"start": "cold"})
    _write(tmp_path, "own:Drafter", [2] * NUM_QUESTIONS, tasks, keeps_memory=True)
    found = {row[0].text: row[1:] for row in memory_table(_group(tmp_path)).rows}
    assert set(found) == {"Token Recycling", "own:Drafter"}
    # In the third quarter half of the questions take 6 steps and half 4, for 12 tokens each.
    values = [cell.value for cell in found["Token Recycling"]]
    assert values == pytest.approx([1, 2, 24 / 10, 3, 3])
    assert found["own:Drafter"][-1].text == "1.00x [1.00, 1.00]"
    assert main([str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    text = capsys.readouterr().out
    assert CAPTION in text and "were asked one after the other" not in text
    assert CAPTION in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_questions_in_the_order_of_their_tasks_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = sorted(_shuffled(NUM_QUESTIONS))
    _write(tmp_path, "vanilla", [1] * NUM_QUESTIONS, tasks)
    _write(tmp_path, "pld", [2] * NUM_QUESTIONS, tasks)
    assert main([str(tmp_path)]) == 0
    assert "were asked one after the other" not in capsys.readouterr().out
    _write(tmp_path, "recycling", [2] * NUM_QUESTIONS, tasks, **HOT)
    assert main([str(tmp_path)]) == 0
    assert "the age of the memory of Token Recycling\n" in capsys.readouterr().out


def test_one_shuffled_question_of_each_task_is_not_called_unshuffled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, meta in (("vanilla", {}), ("recycling", HOT)):
        _write(tmp_path, method, [1] * len(TASKS), list(TASKS), shuffle=0, **meta)
    assert main([str(tmp_path)]) == 0
    assert "were asked one after the other" not in capsys.readouterr().out


def test_each_shard_has_a_memory_of_its_own(tmp_path: Path) -> None:
    count = 2 * NUM_QUESTIONS
    tasks, shards = _shuffled(count), [{"shard": "1/2"}, {"shard": "2/2"}]
    # Rows of two shards lie beside each other: those with few questions before them come first.
    lengths = [1] * (count // 4) + [3] * (3 * count // 4)
    _write(tmp_path, "vanilla", [1] * count, tasks, merged_from=shards)
    _write(tmp_path, "recycling", lengths, tasks, merged_from=shards, **HOT)
    ((_, *cells),) = memory_table(_group(tmp_path)).rows
    assert [cell.value for cell in cells] == pytest.approx([1, 3, 3, 3, 3])


def test_few_questions_and_unknown_steps_have_no_table(tmp_path: Path) -> None:
    few = 4 * LEAST_QUESTIONS - 1
    _write(tmp_path, "vanilla", [1] * few, _shuffled(few))
    _write(tmp_path, "recycling", [2] * few, _shuffled(few), **HOT)
    assert memory_table(_group(tmp_path)).rows == []


def test_where_nothing_grows_the_interval_holds_one_in_95_percent() -> None:
    generator = np.random.default_rng(0)
    num_trials, num_held = 400, 0
    for _ in range(num_trials):
        steps = generator.gamma(2, 20, 60).astype(int) + 1.0
        accepted = steps * (1 + generator.gamma(2, 0.3, 60))
        parts = np.arange(60) * len(PARTS) // 60
        work = pd.concat(
            {
                name: pd.DataFrame({part: values * (parts == part) for part in range(LAST + 1)})
                for name, values in (("accepted", accepted), ("steps", steps))
            },
            axis=1,
        )
        low, high = paired_interval(growth_of(work))
        num_held += low <= 1 <= high
    assert 0.93 <= num_held / num_trials <= 0.98
