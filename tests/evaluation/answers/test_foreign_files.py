"""Answer files of other programs: EAGLE's, Medusa's and specdec_bench's forms, alone and mixed.

Run: pytest tests/evaluation/answers/test_foreign_files.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from evaluation import defects, equal, leaderboard, speed
from evaluation.answers.answer_file import Categories
from evaluation.answers.row import AnswerRow
from evaluation.scoring.per_question import question_frame
from model.commands.command_line import UserError
from tests.evaluation.answers.answer_rows import Row, make_row, write_answers
from tests.evaluation.conftest import DEMO_MODEL

Capture = pytest.CaptureFixture[str]
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter."]},
    {"question_id": 82, "category": "qa", "turns": ["Who?"]},
]


def _eagle_row(question_id: int, scale: float = 1.0, **choice_keys: Any) -> Row:
    """Return a row as EAGLE, Medusa and FastChat write it: no category, `idxs` for steps."""
    choice = {
        "index": 0,
        "turns": ["one text", "another text"],
        "idxs": [31, 40],
        "new_tokens": [96, 128],
        "wall_time": [2.1 * scale, 2.9 * scale],
    }
    return {
        "question_id": question_id,
        "answer_id": "x",
        "model_id": "m",
        "choices": [choice | choice_keys],
        "tstamp": 1.0,
    }


def _response(question_id: int, asked: list[str], answered: list[str]) -> Row:
    """Return a row of specdec_bench's responses.jsonl: the id is its place in the run."""
    choices = [{"index": 0, "turns": answered}]
    return {"question_id": question_id, "turns": asked, "choices": choices}


@pytest.fixture
def eagle(tmp_path: Path) -> str:
    return str(write_answers(tmp_path / "eagle.jsonl", [_eagle_row(81), _eagle_row(82)]))


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """The baseline: as many steps as tokens, three times the seconds."""
    rows = [_eagle_row(number, scale=3.0, idxs=[95, 127]) for number in (81, 82)]
    return str(write_answers(tmp_path / "plain.jsonl", [row | {"model_id": "b"} for row in rows]))


@pytest.fixture
def questions(tmp_path: Path) -> str:
    return str(write_answers(tmp_path / "asked" / "question.jsonl", QUESTIONS))


def _report(capsys: Capture) -> tuple[str, dict[str, Any]]:
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


def test_idxs_count_steps_from_0(eagle: str, plain: str, capsys: Capture) -> None:
    assert speed.main(["--file-path", eagle, "--base-path", plain, "--json"]) == 0
    text, report = _report(capsys)
    task = report["tasks"]["uncategorised"]
    assert task["mean_accepted_tokens"] == pytest.approx((96 + 128) / (32 + 41))
    assert task["exact_mean_accepted_tokens"] == task["mean_accepted_tokens"]
    assert task["speedup"] == task["exact_speedup"] == pytest.approx(3.0)
    assert f"2 of 2 rows in {eagle} have no category and count as one task; --question-file" in text


def test_categories_come_from_a_question_file(
    eagle: str, plain: str, questions: str, capsys: Capture
) -> None:
    given = ["--file-path", eagle, "--base-path", plain, "--question-file", questions]
    assert speed.main([*given, "--json"]) == 0
    text, report = _report(capsys)
    assert list(report["tasks"]) == ["mt_bench", "qa", "overall"]
    assert "no category" not in text
    assert speed.main([*given, "--json", "--category-map", "qa=rag", "writing=mine"]) == 0
    assert list(_report(capsys)[1]["tasks"]) == ["rag", "mine", "overall"]


@pytest.mark.parametrize("text", ["qa", "qa=", "=rag"])
def test_a_bad_category_map_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"category_map: got '{text}'; allowed: OLD=NEW"):
        Categories(None, [text])


def test_rates_need_tokens_and_seconds_alone(
    eagle: str, plain: str, tmp_path: Path, capsys: Capture
) -> None:
    rows = [_eagle_row(81), _eagle_row(82)]
    for row in rows:
        del row["choices"][0]["idxs"]
    bare = str(write_answers(tmp_path / "bare.jsonl", rows))
    assert speed.main(["--file-path", bare, "--base-path", plain, "--json"]) == 0
    overall = _report(capsys)[1]["tasks"]["overall"]
    assert overall["exact_mean_accepted_tokens"] is overall["mean_accepted_tokens"] is None
    assert overall["exact_speedup"] == pytest.approx(3.0)
    assert defects.main([bare]) == 1
    assert "no 'accept_lengths', 'decoding_steps' or 'idxs': mean accepted" in _report(capsys)[0]


def test_texts_whose_tokens_nobody_counted(
    eagle: str, tmp_path: Path, questions: str, capsys: Capture
) -> None:
    rows = [_eagle_row(number, new_tokens=[0, 0]) for number in (81, 82)]
    base = str(write_answers(tmp_path / "base.jsonl", rows))
    assert defects.main([base, "--question-file", questions]) == 1
    text, report = _report(capsys)
    assert f"{base}:1: question 81: texts, but no new token was counted; " in text
    assert "--tokenizer-path" in text
    assert report["defects"] == 2
    given = ["--file-path", eagle, "--base-path", base]
    with pytest.raises(UserError, match="no question has figures in both"):
        speed.main(given)
    assert speed.main([*given, "--json", "--tokenizer-path", str(DEMO_MODEL)]) == 0
    overall = _report(capsys)[1]["tasks"]["overall"]
    assert overall["speedup"] > 0
    assert overall["questions"] == 0, "exact figures are made of counted tokens"


def test_what_is_missing_is_listed_by_name(
    eagle: str, questions: str, tmp_path: Path, capsys: Capture
) -> None:
    assert defects.main([eagle]) == 1
    text, report = _report(capsys)
    assert f"{eagle}:1: question 81: no 'category'; --question-file FILE gives" in text
    assert report["defects"] == 2
    assert defects.main([eagle, "--question-file", questions]) == 0
    capsys.readouterr()
    path = write_answers(tmp_path / "responses.jsonl", [_response(0, ["Who?"], ["I."])])
    assert defects.main([str(path), "--question-file", questions]) == 1
    assert "no 'new_tokens' and no 'wall_time'" in _report(capsys)[0]


def test_answers_with_their_questions_are_found_by_these(questions: str) -> None:
    categories = Categories(questions)
    rows = [_response(0, ["Who?"], ["I."]), _response(81, ["Other?"], ["No."])]
    found = [categories.of(AnswerRow.of(row)).category for row in rows]
    assert found == ["qa", "uncategorised"]


def test_texts_alone_can_be_compared(tmp_path: Path, capsys: Capture) -> None:
    asked = ["Who?", "Why?"]
    ours = make_row(0, "qa", [2], 1.0, ["I.", "So."])
    texts = {"same": ["I.", "So."], "other": ["I.", "No."]}
    files = {
        name: write_answers(tmp_path / f"{name}.jsonl", [_response(0, asked, turns)])
        for name, turns in texts.items()
    }
    base = write_answers(tmp_path / "ours.jsonl", [ours])
    for name, code in (("same", 0), ("other", 1)):
        given = ["--jsonfile1", str(base), "--jsonfile2", str(files[name])]
        assert equal.main(given) == code
    assert "First difference: question 0 (qa), choice 0, turn 1, character 0" in _report(capsys)[0]


def test_a_leaderboard_of_files_of_others_writes_every_format(
    eagle: str, plain: str, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "report"
    assert leaderboard.main([eagle, plain, "--base", plain, "--json", "-", "--out", str(out)]) == 0
    text, report = _report(capsys)
    assert "questions not recorded" in text
    assert [row["uncategorised"] for row in report["measured"]] == pytest.approx([3.0, 1.0])
    assert len(list(out.iterdir())) == len(leaderboard.FILES)


def test_gsm8k_under_the_name_of_mt_bench_is_its_own_task() -> None:
    rows = [AnswerRow.of(make_row(number, "math", [2], 1.0)) for number in range(3)]
    assert set(question_frame(rows)["task"]) == {"math"}
    mixed = [*rows, AnswerRow.of(make_row(9, "stem", [2], 1.0))]
    assert set(question_frame(mixed)["task"]) == {"mt_bench"}


def test_a_file_with_a_byte_order_mark_is_read(eagle: str, plain: str, capsys: Capture) -> None:
    Path(eagle).write_bytes(b"\xef\xbb\xbf" + Path(eagle).read_bytes())
    assert speed.main(["--file-path", eagle, "--base-path", plain]) == 0


def test_steps_that_nobody_counted_are_not_known() -> None:
    row = _eagle_row(1)
    del row["choices"][0]["idxs"]
    (choice,) = AnswerRow.of(row).choices
    assert math.isnan(choice.num_steps)
    assert math.isnan(choice.num_accepted)
