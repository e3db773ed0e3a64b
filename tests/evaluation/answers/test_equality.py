"""Whether answers are the baseline's: what is compared, and what a difference means.

Run: pytest tests/evaluation/answers/test_equality.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evaluation.answers.differences import (
    Equality,
    equality_of,
    read_ties,
    verdict_path,
    write_verdict,
)
from evaluation.answers.record import RunRecord
from tests.evaluation.answers.answer_rows import answer_rows, failed_row, make_row, write_answers

GREEDY = {"method": "pld", "temperature": 0.0, "dtype": "float32"}


def _rows(*answers: list[int] | None) -> list[dict[str, Any]]:
    return [
        failed_row(number, "qa")
        if ids is None
        else make_row(number, "qa", [1] * len(ids), 1.0, token_ids=[ids])
        for number, ids in enumerate(answers)
    ]


def _equality(rows: list[dict[str, Any]], base: list[dict[str, Any]], **meta: Any) -> Equality:
    record = RunRecord.of(GREEDY | meta)
    return equality_of(answer_rows(rows), record, answer_rows(base), record)


def test_tokens_of_the_same_questions_are_compared() -> None:
    base = _rows([1, 2], [3, 4], [5, 6], None)
    found = _equality(_rows([1, 2], [3, 9], None, [7]), base)
    assert (found.num_compared, found.num_differing) == (2, 1)
    assert found.is_broken and str(found) == "1 of 2"
    assert not _equality(base, base).is_broken


def test_texts_are_compared_where_a_side_has_no_tokens() -> None:
    mine = [make_row(1, "qa", [1, 1], 1.0, ["a text"])]
    other = [make_row(1, "qa", [1, 1], 1.0, ["another text"], token_ids=[[1, 2]])]
    found = _equality(mine, other)
    assert (found.num_compared, found.num_differing, found.num_by_text) == (1, 1, 1)


@pytest.mark.parametrize(
    ("meta", "is_broken"), [({}, True), ({"dtype": "bfloat16"}, False), ({"dtype": None}, False)]
)
def test_only_in_float32_is_every_difference_an_error(
    meta: dict[str, Any], is_broken: bool
) -> None:
    assert _equality(_rows([1]), _rows([2]), **meta).is_broken is is_broken


def test_samples_are_not_compared() -> None:
    found = _equality(_rows([1]), _rows([2]), temperature=0.7)
    assert found == Equality() and str(found) == "-"


def test_a_kept_verdict_counts_for_the_very_files_that_were_judged(tmp_path: Path) -> None:
    mine = write_answers(tmp_path / "pld.jsonl", _rows([1], [2]))
    base = write_answers(tmp_path / "vanilla.jsonl", _rows([1], [3]))
    assert read_ties(mine, base) is None
    write_verdict(mine, base, num_ties=1, num_bugs=0)
    assert read_ties(mine, base) == 1
    assert read_ties(base, mine) is None
    write_answers(mine, _rows([1], [4]))
    assert read_ties(mine, base) is None, "the answers have changed"
    verdict_path(mine).write_text("[]")
    assert read_ties(mine, base) is None


def test_runs_are_added_up() -> None:
    judged, equal = Equality(3, 2, num_ties=2), Equality(3, 0)
    assert judged.plus(equal) == Equality(6, 2, num_ties=2)
    assert str(judged.plus(equal)) == "2 of 6 (near-ties)"
    assert judged.plus(Equality(3, 1)).num_ties is None, "one run was not judged"
    bug = Equality(3, 2, num_ties=1)
    assert bug.is_broken and str(bug) == "2 of 3 (1 near-ties, 1 bugs)"
