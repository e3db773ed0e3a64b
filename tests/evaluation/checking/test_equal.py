"""The equal command finds every kind of difference, and where it begins.

Run: pytest tests/evaluation/checking/test_equal.py
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from evaluation.answers import differences
from evaluation.answers.differences import Comparison
from evaluation.equal import main
from model.commands.command_line import UserError
from tests.evaluation.answers.answer_rows import (
    Row,
    answer_rows,
    failed_row,
    make_row,
    write_answers,
)

ROOT = Path(__file__).resolve().parents[3]
Capture = pytest.CaptureFixture[str]


def _rows(with_ids: bool) -> list[Row]:
    """Three two-turn answers with two choices each."""
    rows = []
    for question_id, category in ((81, "writing"), (82, "qa"), ("x", "rag")):
        row = make_row(question_id, category, [3, 3], 1.0, ["the first turn", "the second turn"])
        if with_ids:
            row["choices"][0]["token_ids"] = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]]
        row["choices"].append(copy.deepcopy(row["choices"][0]) | {"index": 1})
        rows.append(row)
    return rows


def compare(rows: list[Row], other_rows: list[Row]) -> Comparison:
    return differences.compare_answers(answer_rows(rows), answer_rows(other_rows))


def _run(
    tmp_path: Path, rows: list[Row], other: list[Row], capsys: Capture
) -> tuple[int, str, dict[str, Any]]:
    write_answers(tmp_path / "a.jsonl", rows)
    write_answers(tmp_path / "b.jsonl", other)
    words = ["--file-path", str(tmp_path), "--jsonfile1", "a.jsonl", "--jsonfile2", "b.jsonl"]
    code = main(words)
    text, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    return code, text, json.loads(last)


@pytest.mark.parametrize("with_ids", [False, True])
def test_equal_in_any_order(tmp_path: Path, with_ids: bool, capsys: Capture) -> None:
    code, text, report = _run(tmp_path, _rows(with_ids), _rows(with_ids)[::-1], capsys)
    counts = (12, 0) if with_ids else (0, 12)
    assert code == 0
    assert text == (f"Equal: 3 questions, 12 turns ({counts[0]} by token ids, {counts[1]} by text)")
    assert report["equal"] is True and report["first_difference"] is None
    assert (report["questions"], report["turns"], report["differing_questions"]) == (3, 12, 0)


def test_counters_and_times_are_no_difference(tmp_path: Path, capsys: Capture) -> None:
    other = _rows(True)
    for row in other:
        row["choices"][0] |= {"accept_lengths": [1] * 6, "wall_time": [9.0], "decoding_steps": [6]}
    assert _run(tmp_path, _rows(True), other, capsys)[0] == 0


def test_text_is_compared_where_one_file_has_no_ids(tmp_path: Path, capsys: Capture) -> None:
    code, text, _ = _run(tmp_path, _rows(True), _rows(False), capsys)
    assert code == 0 and "(0 by token ids, 12 by text)" in text


def test_first_differing_token(tmp_path: Path, capsys: Capture) -> None:
    other = _rows(True)
    other[1]["choices"][1]["token_ids"][1][6] = 99
    other[1]["choices"][1]["turns"][1] = "the second time"
    other[2]["choices"][0]["token_ids"][0][0] = 99
    code, text, report = _run(tmp_path, _rows(True), other, capsys)
    assert code == 1
    assert text.splitlines() == [
        "Not equal: 2 of 3 questions differ",
        "First difference: question 82 (qa), choice 1, turn 1, token 6 (counted from 0): tokens differ",
        f"  token in {tmp_path}/a.jsonl: ... 10 11 12 13 14 [15] 16",
        f"  token in {tmp_path}/b.jsonl: ... 10 11 12 13 14 [99] 16",
        f"  text in {tmp_path}/a.jsonl: 'the second t' then 'urn'",
        f"  text in {tmp_path}/b.jsonl: 'the second t' then 'ime'",
    ]
    assert report["differing_question_ids"] == [82, "x"]
    first = report["first_difference"]
    assert (first["question_id"], first["choice"], first["turn"]) == (82, 1, 1)
    assert (first["unit"], first["position"]) == ("token", 6)


def test_a_difference_between_passes_with_the_same_bits_is_a_bug(
    tmp_path: Path, capsys: Capture
) -> None:
    for names, is_said in (
        (("fused, same bits", "fused, same bits"), True),
        (("fused, same bits", "fused, 3 drafts by the stock model"), False),
        (("fused, same bits", None), False),
    ):
        for file, name in zip("ab", names, strict=True):
            meta = {"method": "vanilla", "kernel_names": {"passes": name}}
            (tmp_path / f"{file}.meta.json").write_text(json.dumps(meta))
        _, text, _ = _run(tmp_path, _rows(True), _rows(True), capsys)
        line = "Both have passes with the same bits for every node: a difference is a bug"
        assert (line in text) == is_said


def test_an_answer_that_ends_early(tmp_path: Path, capsys: Capture) -> None:
    other = _rows(True)
    del other[0]["choices"][0]["token_ids"][0][3:]
    _, text, report = _run(tmp_path, _rows(True), other, capsys)
    assert "5 6 7 [8]" in text and "5 6 7 [end]" in text
    assert report["first_difference"]["position"] == 3


def test_first_differing_character(tmp_path: Path, capsys: Capture) -> None:
    other = _rows(False)
    other[0]["choices"][0]["turns"][0] = "the first\nturn"
    code, text, report = _run(tmp_path, _rows(False), other, capsys)
    assert code == 1
    assert "turn 0, character 9 (counted from 0): texts differ" in text
    assert text.endswith(r"'the first' then '\nturn'")
    assert report["first_difference"]["unit"] == "character"


def _drop_choice(row: Row) -> None:
    row["choices"].pop()


def _drop_turn(row: Row) -> None:
    row["choices"][0]["turns"].pop()


def _change_category(row: Row) -> None:
    row["category"] = "code"


def _fail(row: Row) -> None:
    row |= failed_row(row["question_id"], row["category"], "too long")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (_drop_choice, "2 choices against 1"),
        (_drop_turn, "2 turns against 1"),
        (_change_category, "the category is 'qa' in the first, 'code' in the second file"),
        (_fail, "the question failed in the second file (too long)"),
    ],
)
@pytest.mark.parametrize("with_ids", [False, True])
def test_rows_of_another_shape(change: Callable[[Row], None], cause: str, with_ids: bool) -> None:
    rows, other = _rows(with_ids), _rows(with_ids)
    change(other[1])
    found = compare(rows, other).differences
    assert [(it.question_id, it.cause) for it in found] == [(82, cause)]
    assert len(compare(other, rows).differences) == 1


def test_missing_rows_on_either_side() -> None:
    rows = _rows(True)
    assert (
        compare(rows, rows[:2]).differences[0].cause == "the question is missing in the second file"
    )
    assert (
        compare(rows[1:], rows).differences[0].cause == "the question is missing in the first file"
    )
    comparison = compare(rows[:2], rows[1:])
    assert [it.question_id for it in comparison.differences] == [81, "x"]
    assert comparison.num_questions == 3


def test_a_question_that_failed_in_both_is_neither_equal_nor_different(
    tmp_path: Path, capsys: Capture
) -> None:
    failed = failed_row(1, "qa", "too long")
    code, text, report = _run(tmp_path, [failed], [failed], capsys)
    cause = "the question failed in the first and the second file (too long and too long)"
    assert text == (
        "Not comparable: 1 of 1 questions failed in both files, which have no answers there to compare; "
        f"the first: question 1 (qa): {cause}"
    )
    assert (code, report["equal"], report["failed_in_both"]) == (2, None, [1])
    assert report["differing_questions"] == 0
    code, text, report = _run(tmp_path, [failed, *_rows(True)], [failed, *_rows(True)], capsys)
    assert (code, report["equal"]) == (2, None)
    assert "\nEqual: 3 questions, 12 turns (12 by token ids, 0 by text)" in text
    code, text, report = _run(tmp_path, [failed, *_rows(True)], [failed, *_rows(True)[1:]], capsys)
    assert (code, report["equal"], report["differing_question_ids"]) == (1, False, [81])
    assert "First difference: question 81 (writing): the question is missing" in text


def test_a_turn_that_raised_an_error_in_both_is_no_equality() -> None:
    rows = [make_row(1, "qa", [2], 1.0, ["ERROR", "an answer"])]
    found = compare(rows, rows)
    assert not found.differences
    [failure] = found.failures
    assert failure.turn == 0 and "'ERROR' in both files" in failure.cause
    other = [make_row(1, "qa", [2], 1.0, ["ERROR", "another answer"])]
    [difference] = compare(rows, other).differences
    assert difference.turn == 1, "a difference counts for more than a failure before it"
    rows[0]["choices"][0]["token_ids"] = [[5], [6]]  # a model may write that word
    assert not compare(rows, rows).failures


@pytest.mark.parametrize("is_left", ["an empty list", "nothing"])
def test_answers_with_nothing_to_compare_are_no_equality(is_left: str) -> None:
    rows = _rows(False)
    for row in rows:
        for choice in row["choices"]:
            choice["turns"] = []
            if is_left == "nothing":
                del choice["turns"]
    causes = {it.cause for it in compare(rows, rows).failures}
    assert causes == {"neither file has a turn to compare"}
    assert len(compare(rows, rows).failures) == 3


def test_token_ids_are_compared_where_texts_were_taken_out() -> None:
    rows = _rows(True)
    for row in rows:
        for choice in row["choices"]:
            del choice["turns"]
    comparison = compare(rows, _rows(True))
    assert (comparison.num_turns_by_ids, comparison.differences) == (12, [])
    other = copy.deepcopy(rows)
    other[1]["choices"][0]["token_ids"][1][3] += 1
    [difference] = compare(rows, other).differences
    assert (difference.question_id, difference.turn, difference.position) == (82, 1, 3)


def test_fewer_lists_of_ids_than_turns_fall_back_to_text() -> None:
    rows = _rows(True)
    for row in rows:
        row["choices"][0]["token_ids"].pop()
    assert compare(rows, rows).num_turns_by_text == 6


def test_files_are_named_or_given_as_paths(tmp_path: Path, capsys: Capture) -> None:
    path = str(write_answers(tmp_path / "a.jsonl", _rows(True)))
    assert main(["--jsonfile1", path, "--jsonfile2", path]) == 0
    folder = str(tmp_path)
    assert main(["--file_path", folder, "--jsonfile1", path, "--jsonfile2", "a.jsonl"]) == 0
    capsys.readouterr()
    for name in ("README.md", folder):
        with pytest.raises(UserError, match=rf"no answer file .*{name}; give the \.jsonl of"):
            main(["--file-path", folder, "--jsonfile1", name, "--jsonfile2", path])


def test_several_files_are_compared_with_the_first_one(tmp_path: Path, capsys: Capture) -> None:
    rows = [make_row(number, "qa", [1], 1.0, ["one", "two"]) for number in range(5)]
    other = copy.deepcopy(rows)
    other[3]["choices"][0]["turns"][0] += " and more"
    paths = [str(write_answers(tmp_path / f"{name}.jsonl", rows)) for name in "abc"]
    wrong = str(write_answers(tmp_path / "wrong.jsonl", other))
    assert main(["--jsonfile1", paths[0], "--jsonfile2", *paths[1:]]) == 0
    line, last = capsys.readouterr().out.splitlines()
    assert line == f"Equal to a.jsonl: 2 of 2 files, {2 * 2 * len(rows)} turns"
    assert json.loads(last)["equal"] is True and len(json.loads(last)["files"]) == 2
    assert main(["--jsonfile1", paths[0], "--jsonfile2", wrong, *paths[1:]]) == 1
    first, second, *_, line, last = capsys.readouterr().out.splitlines()
    assert (first, line.split(", ")[0]) == (f"{wrong}:", "Equal to a.jsonl: 2 of 3 files")
    assert second.startswith("Not equal: 1 of ") and json.loads(last)["equal"] is False


def test_options_without_an_effect_are_refused_before_the_verdict(
    tmp_path: Path, capsys: Capture
) -> None:
    path = str(write_answers(tmp_path / "a.jsonl", _rows(True)))
    files = ["--jsonfile1", path, "--jsonfile2", path]
    for more, message in (
        (["--file-path", "elsewhere"], "file_path: got elsewhere; allowed: an existing folder"),
        (["--question-file", path], "question_file: got it without --model-path"),
        (["--allow-pickle"], "allow_pickle: got it without --model-path"),
    ):
        with pytest.raises(UserError, match=message):
            main([*files, *more])
        assert capsys.readouterr().out == ""


def test_exit_codes(tmp_path: Path) -> None:
    write_answers(tmp_path / "a.jsonl", _rows(True))
    write_answers(tmp_path / "b.jsonl", _rows(True)[:2])

    def run(other: str) -> subprocess.CompletedProcess[str]:
        words = ["--file-path", str(tmp_path), "--jsonfile1", "a.jsonl", "--jsonfile2", other]
        command = [sys.executable, "-m", "evaluation.equal", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert run("a.jsonl").returncode == 0
    assert run("b.jsonl").returncode == 1
    bad = run("c.jsonl")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert bad.stderr.startswith("error: no answer file")


def test_pipes_are_compared_like_files(tmp_path: Path, capsys: Capture) -> None:
    content = write_answers(tmp_path / "a.jsonl", _rows(with_ids=True)).read_bytes()
    pipes = [tmp_path / "one", tmp_path / "other"]
    for pipe in pipes:
        os.mkfifo(pipe)
        Thread(target=pipe.write_bytes, args=(content,), daemon=True).start()
    assert main(["--jsonfile1", str(pipes[0]), "--jsonfile2", str(pipes[1])]) == 0
    assert "Equal: 3 questions" in capsys.readouterr().out
