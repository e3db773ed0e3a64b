"""Question files: what is read, and which part of it. Mistakes are in test_bad_inputs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest

from evaluation.questions.questions import (
    PLACEHOLDER,
    Question,
    load_questions,
    question_file_of,
    spread,
)
from evaluation.scoring.per_question import SPEED_BENCH_CATEGORIES, task_of
from model.commands.command_line import UserError
from tests.evaluation.conftest import write_rows

ROWS = [
    {"question_id": index, "category": "qa", "turns": [f"question {index}"]} for index in range(5)
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "question.jsonl", ROWS)


@pytest.mark.parametrize(
    ("begin", "end"), [(None, None), (0, None), (2, None), (None, 2), (1, 3), (4, 5), (3, 99)]
)
def test_begin_and_end_select_as_a_python_slice(
    file: Path, begin: int | None, end: int | None
) -> None:
    ids = [question.question_id for question in load_questions(file, begin, end)]
    assert ids == [0, 1, 2, 3, 4][begin:end]


@pytest.mark.parametrize(("begin", "end"), [(5, None), (3, 3), (0, 0), (-1, None), (0, -1)])
def test_a_selection_of_nothing_is_refused(file: Path, begin: int, end: int | None) -> None:
    with pytest.raises(UserError, match=r"question_(begin|end)"):
        load_questions(file, begin, end)


def test_questions_are_spread_over_the_file(file: Path) -> None:
    questions = [Question(index, "qa", ("?",)) for index in range(100)]
    assert [question.question_id for question in spread(questions, 3)] == [0, 50, 99]
    assert spread(questions, 200) == questions == spread(questions, None)
    assert [question.question_id for question in load_questions(file, 1, 5, 2)] == [1, 4]


def test_mistakes_outside_the_selection_are_found_too(file: Path) -> None:
    with file.open("a") as lines:
        lines.write("{oops\n")
    with pytest.raises(UserError, match="line 6"):
        load_questions(file, 0, 1)


def test_line_separators_inside_a_text_do_not_cut_it(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four"
    row = {"question_id": "a", "category": "qa", "turns": [text]}
    file = tmp_path / "question.jsonl"
    file.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert load_questions(file) == [Question("a", "qa", (text,))]


def test_blank_lines_windows_line_ends_and_further_keys_do_no_harm(tmp_path: Path) -> None:
    rows = [json.dumps({**row, "reference": ["x"], "note": None}) for row in ROWS]
    file = tmp_path / "question.jsonl"
    file.write_bytes("\r\n\r\n".join(rows).encode())
    assert [question.turns for question in load_questions(file)] == [
        tuple(row["turns"]) for row in ROWS
    ]


FORMS = {
    "EAGLE": {"question_id": 7, "category": "", "turns": ["Who?"], "reference": ["I."]},
    "FastChat": {"question_id": 7, "text": "Who?", "category": "generic"},
    "HumanEval": {"task_id": "Some/7", "prompt": "def f():", "entry_point": "f", "test": "x"},
    "ShareGPT": {
        "id": "a_7",
        "conversations": [
            {"from": "system", "value": "Be short."},
            {"from": "human", "value": "Who?"},
            {"from": "gpt", "value": "I."},
            {"from": "human", "value": "Why?"},
        ],
    },
    "ShareGPT without ids": {"conversations": [{"from": "user", "value": "Who?"}]},
}
READ = {
    "EAGLE": Question(7, "uncategorised", ("Who?",)),
    "FastChat": Question(7, "generic", ("Who?",)),
    "HumanEval": Question("Some/7", "code", ("def f():",)),
    "ShareGPT": Question("a_7", "uncategorised", ("Who?", "Why?"), "Be short."),
    "ShareGPT without ids": Question(1, "uncategorised", ("Who?",)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_list", [False, True])
def test_forms_of_others_are_read(form: str, is_list: bool, tmp_path: Path) -> None:
    file = tmp_path / "q.json"
    file.write_text(json.dumps([FORMS[form]] if is_list else FORMS[form], indent=is_list or None))
    assert load_questions(file) == [READ[form]]


def test_categories_are_called_otherwise_on_demand(file: Path) -> None:
    assert {it.category for it in load_questions(file, renames=["qa=rag", "x=y"])} == {"rag"}


def test_conversations_without_a_question_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = [{"id": "b", "conversations": []}]
    file = write_rows(tmp_path / "q.jsonl", [*empty, FORMS["ShareGPT"], *empty])
    assert load_questions(file) == [READ["ShareGPT"]]
    assert "q.jsonl: 2 conversations without a message of the user are left out" in (
        capsys.readouterr().err
    )


def test_a_byte_order_mark_is_no_part_of_a_file(file: Path) -> None:
    questions = load_questions(file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_questions(file) == questions


def test_a_placeholder_is_no_question(tmp_path: Path) -> None:
    row = {**ROWS[0], "turns": [f"{PLACEHOLDER} FROM SOMEWHERE"]}
    with pytest.raises(UserError, match=r"line 1: got a placeholder; .*prepare_data\.py"):
        load_questions(write_rows(tmp_path / "q.jsonl", [row]))


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_parquet(_: Path) -> pd.DataFrame:
        raise ImportError

    monkeypatch.setattr(pd, "read_parquet", read_parquet)
    (tmp_path / "q.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(UserError, match=r"is Parquet, which needs pyarrow; pip install pyarrow"):
        load_questions(tmp_path / "q.parquet")


def test_parquet_of_speed_bench_is_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    rows = [row | {"sub_category": "x", "src_id": None} for row in ROWS]
    pd.DataFrame(rows).to_parquet(tmp_path / "q.parquet")
    expected = [Question(row["question_id"], "qa", tuple(row["turns"])) for row in ROWS]
    assert load_questions(tmp_path / "q.parquet") == expected
    (tmp_path / "q.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        load_questions(tmp_path / "q.parquet")


def test_a_number_and_its_text_are_two_ids(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "question_id": 1}, {**ROWS[0], "question_id": "1"}]
    questions = load_questions(write_rows(tmp_path / "question.jsonl", rows))
    assert [question.question_id for question in questions] == [1, "1"]


def test_the_demo_questions_are_there_and_have_every_category_of_spec_bench() -> None:
    questions = load_questions(question_file_of("demo"))
    categories = {question.category for question in questions}
    assert len(questions) == 30
    assert len(categories) == 14
    assert {"writing", "translation", "summarization", "qa", "rag", "code"} <= categories


@pytest.mark.parametrize("bench", ["spec_bench", "mt_bench", "mbpp"])
def test_a_benchmark_that_was_not_fetched_names_the_command(
    bench: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluation.questions.questions.DATA_FOLDER", tmp_path)
    with pytest.raises(UserError, match=f"run: python -m scripts.download_data {bench}"):
        question_file_of(bench)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"question_id": 1, "question_id": 2, "category": "qa", "turns": ["a"]}', "occurs twice"),
        ('{"question_id": 1, "category": "qa", "turns": ["\\ud800"]}', "surrogate"),
        ('{"question_id": 1, "category": "\\udc00", "turns": ["a"]}', "surrogate"),
        ("[" * 100_000, "is not JSON"),
        ('{"question_id": 1, "category": "qa", "turns": ["a"], "system": ["b"]}', "system: got"),
        ('{"question_id": ' + "1" * 10_000 + "}", "is not JSON"),
    ],
)
def test_a_hostile_line_is_refused_with_its_number(line: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UserError, match=says) as error:
        load_questions(file)
    assert "line 1" in str(error.value)
    assert len(str(error.value)) < 500


def test_long_lines_and_control_characters_are_text(tmp_path: Path) -> None:
    turns = ["\0\x1b[2J\u2028\x7f", "x" * 10_000_000, "\U0001f600"]
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": turns}) + "\n")
    assert load_questions(file)[0].turns == tuple(turns)


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="a pipe or a device"):
            load_questions(file)
    huge = tmp_path / "huge.jsonl"
    huge.touch()
    os.truncate(huge, 2**40)  # takes no room on the disk
    with pytest.raises(UserError, match="allowed: at most"):
        load_questions(huge)


def test_the_eleven_categories_of_speed_bench_are_read_from_its_parquet_and_are_columns(
    tmp_path: Path,
) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    # As published: ids are hashes, and there are further columns.
    more = {"sub_category": "x", "source": "y", "src_id": None, "difficulty": "hard"}
    rows = [
        {"question_id": f"{place:032x}", "category": category, "turns": ["One?", "Two?"], **more}
        for place, category in enumerate(sorted(SPEED_BENCH_CATEGORIES))
    ]
    pd.DataFrame(rows).assign(multiturn=True).to_parquet(tmp_path / "test.parquet")
    found = load_questions(tmp_path / "test.parquet")
    categories = {one.category for one in found}
    assert categories == SPEED_BENCH_CATEGORIES
    assert len(categories) == 11
    assert {one.turns for one in found} == {("One?", "Two?")}


def test_a_task_is_speed_bench_s_category_beside_the_one_that_only_it_has() -> None:
    assert {task_of(one, SPEED_BENCH_CATEGORIES) for one in SPEED_BENCH_CATEGORIES} == (
        SPEED_BENCH_CATEGORIES
    )
    assert task_of("coding", {"coding", "writing"}) == "mt_bench"
    assert task_of("extraction", SPEED_BENCH_CATEGORIES) == "mt_bench"
