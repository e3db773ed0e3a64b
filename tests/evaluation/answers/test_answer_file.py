"""Reading answer files: what is wrong is named with file and line; failures are recognised.

Run: pytest tests/evaluation/answers/test_answer_file.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.answers.answer_file import read_answers
from evaluation.answers.record import RunRecord, sidecar_path
from evaluation.answers.row import AnswerRow
from model.commands.command_line import UserError
from tests.evaluation.answers.answer_rows import answer_rows, failed_row, make_row, write_answers

GOOD = make_row(1, "qa", [2, 1], 0.5)


def test_rows_come_back_in_file_order(tmp_path: Path) -> None:
    rows = [make_row(9, "qa", [1], 1.0, ["Zeile\u2028zwei ü"]), GOOD, failed_row("x", "rag")]
    assert read_answers(write_answers(tmp_path / "a.jsonl", rows)) == answer_rows(rows)


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{json.dumps(GOOD)}\n  \n\n")
    assert read_answers(str(path)) == answer_rows([GOOD])


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


def _with_choice(**keys: Any) -> dict[str, Any]:
    return GOOD | {"choices": [GOOD["choices"][0] | keys]}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "line 2: is not JSON"),
        (json.dumps(GOOD)[:-20], "line 2: is not JSON"),
        ("[" * 100_000, "line 2: is not JSON"),
        (
            '{"question_id": 1, "question_id": 2}',
            "line 2: is not JSON: the key 'question_id' occurs twice",
        ),
        (GOOD | {"category": "\ud800"}, "line 2: holds half of a surrogate pair"),
        ("[1, 2]", "line 2: an answer is a JSON object, got list"),
        (_without("question_id"), "line 2: no 'question_id'"),
        (_without("choices"), "line 2: no 'choices'"),
        (GOOD | {"question_id": 77}, "line 2: question 77 is already answered in line 1"),
        (GOOD | {"question_id": [1]}, "line 2: question_id is"),
        (GOOD | {"question_id": True}, "line 2: question_id is"),
        (GOOD | {"category": None}, "line 2: category is"),
        (GOOD | {"choices": {}}, "line 2: choices is a list of objects"),
        (GOOD | {"choices": ["text"]}, "line 2: choices is a list of objects"),
        (_with_choice(new_tokens=7), "line 2: new_tokens is a list of numbers, got 7"),
        (_with_choice(wall_time=["1.0"]), "line 2: wall_time is a list of numbers"),
        (_with_choice(accept_lengths=[None]), "line 2: accept_lengths is a list of numbers"),
        (_with_choice(turns=[None]), "line 2: turns is a list of texts"),
        (_with_choice(token_ids=[1, 2]), "line 2: token_ids is a list of token ids"),
        (_with_choice(token_ids=7), "line 2: token_ids is a list of token ids"),
        (_with_choice(wall_time=[10**400]), "line 2: wall_time is a list of numbers"),
        # Optional keys of ours, which other writers may mean otherwise.
        (_with_choice(decode_time=1.5), "line 2: decode_time is a list of numbers, got 1.5"),
        (_with_choice(draft_tokens=[None]), "line 2: draft_tokens is a list of numbers"),
        (_with_choice(drafted=[3, 2]), "line 2: drafted is a list of counts"),
        (_with_choice(accepted=7), "line 2: accepted is a list of counts"),
        (_with_choice(sources=["pld"]), "line 2: sources is an object"),
        (_with_choice(sources=[{"pld": [1, 2, 3]}]), "line 2: sources is an object"),
        (_with_choice(step_times=[{"draft": None}]), "line 2: step_times is an object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{json.dumps(GOOD | {'question_id': 77})}\n{text}\n")
    with pytest.raises(UserError) as caught:
        read_answers(path)
    assert str(caught.value).startswith(f"{path}, {complaint}")
    assert "\n" not in str(caught.value)


def test_missing_empty_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no answer file .*none\.jsonl"):
        read_answers(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"empty\.jsonl holds no answers"):
        read_answers(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question_id": "\xe9"}')
    with pytest.raises(UserError, match=r"latin\.jsonl is not UTF-8"):
        read_answers(tmp_path / "latin.jsonl")
    with pytest.raises(UserError, match="cannot read the answer file"):
        read_answers(tmp_path)


def test_failures() -> None:
    assert not AnswerRow.of(GOOD).is_failed
    assert not AnswerRow.of(GOOD | {"error": None}).is_failed
    assert AnswerRow.of(failed_row(1, "qa")).is_failed
    assert AnswerRow.of(GOOD | {"error": "too long"}).is_failed
    assert AnswerRow.of(GOOD | {"choices": []}).is_failed
    assert AnswerRow.of(_with_choice(new_tokens=[])).is_failed
    assert AnswerRow.of(GOOD | {"choices": [{"turns": []}]}).is_failed
    assert not AnswerRow.of(GOOD | {"choices": [{"turns": ["text"]}]}).is_failed  # but not counted


def test_a_row_of_strangers_is_written_as_it_was_read() -> None:
    values = {
        "choices": [{"turns": ["ü"], "theirs": [1]}],
        "mine": {"x": None},
        **_without("choices"),
    }
    line = json.dumps(values)
    row = AnswerRow.from_json(line, "a.jsonl, line 1")
    assert row.to_json() == line
    assert json.loads(row.plus(shard=2, category="rag").to_json()) == values | {
        "shard": 2,
        "category": "rag",
    }
    assert list(row.plus(shard=2, category="rag").values) == [*values, "shard"]


def test_sidecar(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "vicuna-temp-0.0.jsonl", [GOOD], {"method": "pld"})
    assert sidecar_path(path) == tmp_path / "vicuna-temp-0.0.meta.json"
    assert RunRecord.read(path).values == {"method": "pld"}
    assert RunRecord.read(tmp_path / "other.jsonl").values == {}


@pytest.mark.parametrize("text", ["{", "[]", "\udce9", '{"options": 3}'])
def test_a_bad_sidecar_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.meta.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=r"the sidecar .*a\.meta\.json is not"):
        RunRecord.read(tmp_path / "a.jsonl")
