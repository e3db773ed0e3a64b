"""Questions that say of their answers what they must be, or resemble: obeyed by all who answer, and drafted.

Run: pytest tests/evaluation/questions/test_known.py
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from evaluation import compare, endpoint, record
from evaluation.questions.known import known_of, request_of
from evaluation.questions.questions import DATA_FOLDER, Question, load_questions
from model.commands.command_line import UserError
from model.commands.model_options import DEMO_MODEL
from tests.evaluation.conftest import read_rows, write_rows
from tests.evaluation.fake_server import fake_server
from tests.model.api.test_decoder import demo

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "n": {"type": "integer", "maximum": 9}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
CALL = {"type": "function", "function": {"name": "go", "arguments": "{}"}}
MESSAGES = [
    {"role": "user", "content": "Go to Rome."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "done"},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Yes."},
]
ASKED = {"question_id": 1, "category": "x", "turns": ["Where?"]}
CALLED = {
    "id": 2,
    "category": "y",
    "messages": MESSAGES,
    "tools": [TOOL],
    "tool_choice": "required",
}
SETS = ("agents", "edits", "extraction")


def test_answers_obey_and_are_the_same_whoever_gives_them(tmp_path: Path) -> None:
    predicted = {**ASKED, "question_id": 3, "prediction": "The sea is a large body of water."}
    file = write_rows(tmp_path / "q.jsonl", [{**ASKED, "response_format": FORM}, CALLED, predicted])
    words = [
        str(DEMO_MODEL),
        "--question-file",
        str(file),
        "--max-new-tokens",
        "60",
        "--threads",
        "1",
    ]
    methods = ["--methods", "vanilla", "hybrid", "pld", "generate"]
    for more in ([], ["--batch-size", "2"], ["--prefix-cache"]):
        out = tmp_path / "-".join(["out", *more])
        named = methods[:-1] if more else methods
        given = ["--model-path", *words, *named, *more, "--runs", "1"]
        assert compare.main([*given, "--out", str(out), "--dtype", "float32"]) == 0
        answers = {}
        for answered in out.glob("*.jsonl"):
            rows = {row["question_id"]: row["choices"][0] for row in read_rows(answered)}
            answers[answered.name] = [rows[key]["turns"] for key in (1, 2, 3)]
            assert json.loads(rows[1]["turns"][0])["city"] in ("Rome", "Oslo")
            call = json.loads(
                rows[2]["turns"][0].removeprefix("<tool_call>").removesuffix("</tool_call>")
            )
            assert call["name"] == "go" and "<tool_call>" not in rows[2]["turns"][1]
            if more == ["--prefix-cache"]:
                assert rows[2]["cached_tokens"][1] > 8 and rows[1]["cached_tokens"] == [0]
            if "hybrid" in answered.name:
                assert any(name.startswith("guide") for name in rows[1]["sources"][0])
        assert len(answers) >= len(named) and len({str(texts) for texts in answers.values()}) == 1


def test_who_does_not_obey_is_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "q.jsonl", [{**ASKED, "response_format": FORM}])
    words = [
        "--model-path",
        str(DEMO_MODEL),
        "--question-file",
        str(file),
        "--out",
        str(tmp_path / "out"),
    ]
    for more, says in (
        (["--methods", "vanilla", "generate-batch", "--batch-size", "2"], "which it does not obey"),
        (
            ["--methods", "vanilla", "generate", "--prefix-cache"],
            "prefix_cache: got it with generate",
        ),
        (["--prefix-cache", "--batch-size", "2"], "prefix_cache, batch_size: got both"),
    ):
        with pytest.raises((UserError, ValueError), match=says):
            compare.main([*words, *more])
    given = [str(DEMO_MODEL), "--question-file", str(file), "--out", str(tmp_path / "trace")]
    with pytest.raises(UserError, match="question 1: got response_format, tool_choice or pre"):
        record.main(given)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**ASKED, "response_format": {"type": "xml"}}, "response_format: got .*; allowed: text"),
        ({**ASKED, "response_format": {"type": "json_schema"}}, "response_format: got"),
        (
            {**ASKED, "tool_choice": "required"},
            "tool_choice: got required; allowed: required, or a",
        ),
        ({**ASKED, "prediction": ["a", "b"]}, "prediction: got .*; allowed: a text for each"),
        ({**ASKED, "prediction": 3}, "prediction: got 3"),
    ],
)
def test_what_says_nothing_of_an_answer_is_named(
    row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"line 1: {says}"):
        load_questions(write_rows(tmp_path / "q.jsonl", [row]))


def test_a_schema_that_is_none_is_refused_before_the_weights(tmp_path: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    file = write_rows(tmp_path / "q.jsonl", [{**ASKED, "response_format": form}])
    words = [
        "--model-path",
        str(DEMO_MODEL),
        "--question-file",
        str(file),
        "--out",
        str(tmp_path / "out"),
    ]
    with pytest.raises(UserError, match="grammar: Invalid type: nonsense"):
        compare.main([*words, "--methods", "vanilla"])


def test_a_schema_that_allows_any_json_is_one(tmp_path: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {}}}
    file = write_rows(tmp_path / "q.jsonl", [{**ASKED, "response_format": form}])
    (question,) = load_questions(file)
    _, tokenizer = demo()
    known = known_of(question, 0, [1, 2], tokenizer, len(tokenizer), [2])
    assert known.grammar is not None and known.guesses is not None
    free = known_of(Question(1, "x", ("Where?",)), 0, [1, 2], tokenizer, len(tokenizer), [2])
    assert free == (None, None)


def test_a_server_is_told(tmp_path: Path) -> None:
    file = write_rows(
        tmp_path / "q.jsonl", [{**ASKED, "response_format": FORM, "prediction": "a"}, CALLED]
    )
    with fake_server(answer=lambda said: "x") as (url, it):
        words = ["--question-file", str(file), "--out", str(tmp_path / "out")]
        assert endpoint.main(["--base-url", url, *words, "--warmup", "0"]) == 0
    first, call, free = it.requests
    assert first["response_format"] == FORM and first["prediction"]["content"] == "a"
    assert call["tool_choice"] == "required" and free["tool_choice"] == "none"


def test_the_sets_are_what_their_script_writes(tmp_path: Path) -> None:
    made = runpy.run_path(str(DATA_FOLDER / "agents/make_questions.py"))
    kept = {name: (DATA_FOLDER / name / "question.jsonl").read_bytes() for name in SETS}
    (written := made["main"].__globals__)["DATA"] = tmp_path
    for name in SETS:
        (tmp_path / name).mkdir()
    written["main"]()
    assert kept == {name: (tmp_path / name / "question.jsonl").read_bytes() for name in SETS}
    numbers = {name: load_questions(DATA_FOLDER / name / "question.jsonl") for name in SETS}
    assert [len(numbers[name]) for name in SETS] == [60, 40, 40]
    calls = [request_of(one, turn) for one in numbers["agents"] for turn in range(len(one.turns))]
    forced = [fields for fields in calls if fields["tool_choice"] == "required"]
    assert len(calls) - len(forced) == 60 and len(forced) >= 180
