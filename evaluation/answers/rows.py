"""Read answer files (Spec-Bench JSONL), for every report.

Answer files come from this repository's inference commands, from Spec-Bench's and from other
people's. Reports therefore check what they read once, here: a file that is not what it should be is
one clear line with the file and the line number, instead of a traceback or a wrong figure.

Use:
    rows = read_answers("data/demo/model_answer/vanilla.jsonl")
    answered = [row for row in rows if not is_failed(row)]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.commands.command_line import UserError
from model.commands.files import parse_json

Row = dict[str, Any]

REQUIRED_KEYS = ("question_id", "category", "choices")
NUMBER_LISTS = (
    *("new_tokens", "wall_time", "accept_lengths", "decoding_steps"),
    *("decode_time", "draft_tokens"),
)

Check = Callable[[Any], bool]


def read_answers(path: str | Path) -> list[Row]:
    """Return the rows of an answer file in file order, failed ones included; one a question.

    Args:
        path: An answer file: UTF-8, one JSON object a line; blank lines are skipped.

    Raises:
        UserError: As `read_lines`, or a question is answered twice; names the file and the line.
    """
    line_of: dict[int | str, int] = {}
    lines = read_lines(path)
    for number, row in lines:
        question_id = row["question_id"]
        if question_id in line_of:
            raise UserError(
                f"{path}, line {number}: question {question_id!r} is already answered in "
                f"line {line_of[question_id]}; keep one row a question"
            )
        line_of[question_id] = number
    return [row for _, row in lines]


def read_lines(path: str | Path) -> list[tuple[int, Row]]:
    """Return the rows of an answer file with their line numbers, as they are: a question may be
    answered twice, as some writers leave it.

    Args:
        path: An answer file: UTF-8, one JSON object a line; blank lines are skipped.

    Raises:
        UserError: The file is missing, unreadable or empty, or a line is not an answer row; names
            the file and the line.
    """
    lines: list[tuple[int, Row]] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    lines.append((number, _parse_row(line, f"{path}, line {number}")))
    except FileNotFoundError:
        raise UserError(f"no answer file {path}; run an inference command first") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); give an answer file") from None
    except OSError as error:
        raise UserError(f"cannot read the answer file {path}: {error.strerror}") from None
    if not lines:
        raise UserError(f"{path} holds no answers; run the inference command again")
    return lines


def is_failed(row: Row) -> bool:
    """Say whether a row records a failure: an error, no choice, or no counted turn."""
    if row.get("error") is not None or not row["choices"]:
        return True
    return not row["choices"][0].get("new_tokens")


def _parse_row(line: str, where: str) -> Row:
    try:
        row = parse_json(line, where)
    except UserError as error:
        raise UserError(f"{error}; mend or delete the line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: an answer is a JSON object, got {type(row).__name__}")
    missing = [key for key in REQUIRED_KEYS if key not in row]
    if missing:
        raise UserError(f"{where}: no {missing[0]!r}; an answer has {', '.join(REQUIRED_KEYS)}")
    question_id = row["question_id"]
    if isinstance(question_id, bool) or not isinstance(question_id, int | str):
        raise UserError(
            f"{where}: question_id is a whole number or a text, got {_short(question_id)}"
        )
    if not _is_text(row["category"]):
        raise UserError(f"{where}: category is a text, got {_short(row['category'])}")
    _check_choices(row["choices"], where)
    return row


def _check_choices(choices: object, where: str) -> None:
    """Check the types that reports rely on; keys may be missing, their reader says so."""
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise UserError(f"{where}: choices is a list of objects, got {_short(choices)}")
    for choice in choices:
        for key, (is_right, what) in CHOICE_KEYS.items():
            if key in choice and not is_right(choice[key]):
                raise UserError(f"{where}: {key} is {what}, got {_short(choice[key])}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether a value is a float, or a whole number that can become one."""
    return isinstance(value, float) or (_is_integer(value) and abs(value) <= sys.float_info.max)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_integer, value))


def _list_of(is_item: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


def _object_of(is_item: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(is_item, value.values()))


def _or_null(is_right: Check) -> Check:
    return lambda value: value is None or is_right(value)


# What the keys of a choice hold, where it has them: those of Spec-Bench, and optional ones of ours.
CHOICE_KEYS: dict[str, tuple[Check, str]] = {
    "turns": (_list_of(_is_text), "a list of texts"),
    **dict.fromkeys(NUMBER_LISTS, (_list_of(_is_number), "a list of numbers")),
    "token_ids": (_or_null(_list_of(_list_of(_is_integer))), "a list of token ids for each turn"),
    **dict.fromkeys(
        ("drafted", "accepted"),
        (_list_of(_list_of(_list_of(_is_integer))), "a list of counts [depth][rank] for each turn"),
    ),
    "sources": (
        _list_of(_object_of(_is_pair)),
        "an object {name: [drafted, accepted]} for each turn",
    ),
    "step_times": (_list_of(_object_of(_is_number)), "an object of seconds for each turn"),
}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
