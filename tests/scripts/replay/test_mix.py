"""A mix asks some questions of each part, none twice, and refuses what it cannot give.

Run: pytest tests/scripts/replay/test_mix.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.commands.command_line import UserError
from scripts.replay.command import build_parser
from scripts.replay.mix import asked_questions, mixed, question_files, title_of


def write_questions(file: Path, categories: str) -> Path:
    """Write a question for each letter, which is its category."""
    file.parent.mkdir(exist_ok=True)
    rows = [
        {"question_id": number, "category": letter, "turns": [f"{file.parent.name} {number}"]}
        for number, letter in enumerate(categories)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_parts_follow_each_other_and_no_question_is_asked_twice(tmp_path: Path) -> None:
    first = write_questions(tmp_path / "first" / "question.jsonl", "aaabbbccc")
    second = write_questions(tmp_path / "second" / "other.jsonl", "dd")
    found = mixed([f"{first}=3", str(second), f"{first}:b=2"])
    ids = [question.question_id for question in found]
    # Spread over nine: the first, the middle, the last. Of b the middle one is taken.
    assert ids == [
        *("first-0", "first-4", "first-8"),
        *("other.jsonl-0", "other.jsonl-1"),
        *("first-3", "first-5"),
    ]
    assert len({question.turns for question in found}) == len(found)


def test_a_page_and_the_files_to_keep_are_named(tmp_path: Path) -> None:
    file = write_questions(tmp_path / "first" / "question.jsonl", "ab")
    words = ["record", "--out", "x", "--mix", f"{file}=1", f"{file}:b"]
    args = build_parser().parse_args(words)
    assert title_of(args) == "1 of first, all of first (b)"
    assert question_files(args) == [file, file]
    assert len(asked_questions(args)) == 2


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("{}=0", "COUNT 1 or more"),
        ("{}=few", "COUNT 1 or more"),
        ("{}=4", "has 3 such questions"),
        ("{}:z", "has 0 such questions"),
        ("nobody", "nobody.*does not exist"),
    ],
)
def test_what_cannot_be_given_is_one_line(part: str, message: str, tmp_path: Path) -> None:
    file = write_questions(tmp_path / "first" / "question.jsonl", "aab")
    with pytest.raises(UserError, match=message) as error:
        mixed([part.format(file)])
    assert "\n" not in str(error.value)


def test_questions_of_one_name_are_refused(tmp_path: Path) -> None:
    files = [write_questions(tmp_path / name / "same.jsonl", "a") for name in ("x", "y")]
    with pytest.raises(UserError, match="two questions have the same name and number"):
        mixed([str(file) for file in files])


@pytest.mark.parametrize("option", ["--num-questions 3", "--bench-name mbpp", "--question-file x"])
def test_a_mix_is_given_alone(option: str) -> None:
    args = build_parser().parse_args(["record", "--out", "x", "--mix", "demo=1", *option.split()])
    with pytest.raises(UserError, match=r"with --mix.*leave one out"):
        asked_questions(args)
