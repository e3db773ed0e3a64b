"""Conversions of published benchmarks: turns as published, known categories, ids from 1.

Run: pytest tests/evaluation/questions/test_source_forms.py
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.questions.pinned_data import PINNED
from evaluation.questions.questions import load_questions
from evaluation.scoring.figures import CODE, SPEC_BENCH_TASKS
from evaluation.scoring.per_question import task_of
from model.commands.command_line import UserError

TEXT = "Three\u2028lines,\n\u00e9, \\frac{1}{2}"  # U+2028 is no end of a line of JSON


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


FORMS = {
    "humaneval": (PINNED["humaneval"].convert, ("prompt", "canonical_solution"), CODE),
    "gsm8k": (PINNED["gsm8k"].convert, ("question", "answer"), "math_reasoning"),
    "math500": (PINNED["math500"].convert, ("problem", "solution"), "math_reasoning"),
}


@pytest.mark.parametrize("bench", FORMS)
def test_rows_become_questions_with_the_published_text(bench: str, tmp_path: Path) -> None:
    convert: Callable[[bytes], bytes]
    convert, (turn, reference), category = FORMS[bench]
    rows = [{turn: f"{TEXT} {i}", reference: f"so {i}", "other": i} for i in range(3)]
    published = _lines(rows)
    content = convert(gzip.compress(published) if bench == "humaneval" else published)
    file = tmp_path / "question.jsonl"
    file.write_bytes(content)
    questions = load_questions(file)
    assert [question.question_id for question in questions] == [1, 2, 3]
    assert [question.turns for question in questions] == [(row[turn],) for row in rows]
    assert {question.category for question in questions} == {category}
    references = [json.loads(line)["reference"] for line in content.decode().split("\n") if line]
    assert references == [[row[reference]] for row in rows]


@pytest.mark.parametrize(
    ("row", "question_id", "category"),
    [
        ({"question": TEXT, "answer": "#### 3"}, 2, "math_reasoning"),
        ({"task_id": 11, "text": TEXT, "code": "pass", "test_list": []}, 11, CODE),
        ({"task_id": 11, "prompt": TEXT, "code": "pass", "test_list": []}, 11, CODE),
        ({"task_id": "HumanEval/0", "prompt": TEXT}, "HumanEval/0", CODE),
    ],
)
def test_files_are_read_as_their_owners_publish_them(
    row: dict[str, Any], question_id: int | str, category: str, tmp_path: Path
) -> None:
    first = {"question_id": 7, "category": "qa", "turns": ["a"]}
    file = tmp_path / "question.jsonl"
    file.write_bytes(_lines([first, row]))
    found = load_questions(file)[1]
    assert (found.question_id, found.category, found.turns) == (question_id, category, (TEXT,))


def test_a_row_of_no_form_is_told_the_forms(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_bytes(_lines([{"problem": TEXT}]))
    with pytest.raises(UserError, match=r"lacks the key 'question_id'; allowed: .*GSM8K"):
        load_questions(file)


@pytest.mark.parametrize("bench", FORMS)
def test_every_category_is_a_column_of_the_tables(bench: str) -> None:
    assert task_of(FORMS[bench][2]) in (*SPEC_BENCH_TASKS, CODE)
