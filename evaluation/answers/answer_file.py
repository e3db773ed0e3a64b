"""Read an answer file, for every report, and give its rows the categories of their questions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.answers.record import RunRecord
from evaluation.answers.row import AnswerRow
from evaluation.questions.questions import category_map, load_questions
from model.commands.command_line import UserError, first_line
from model.commands.model_options import resolve_model

# Bytes of a row that is read to see whether a file holds answers.
LONGEST_LINE = 2**28


def read_answers(path: str | Path) -> list[AnswerRow]:
    """Return the rows of an answer file in file order, failed ones included.

    Errors are those of `read_lines`, and a `UserError` if a question is answered twice.
    """
    line_of: dict[int | str, int] = {}
    lines = read_lines(path)
    for number, row in lines:
        if row.question_id in line_of:
            raise UserError(
                f"{path}, line {number}: question {row.question_id!r} is already answered in "
                f"line {line_of[row.question_id]}; keep one row a question"
            )
        line_of[row.question_id] = number
    return [row for _, row in lines]


def read_lines(path: str | Path) -> list[tuple[int, AnswerRow]]:
    """Return the rows of an answer file with their line numbers; a question may be answered twice.

    The file is UTF-8, with or without a byte order mark, and has one JSON object a line; blank lines are skipped. A
    `UserError` if the file is missing, unreadable or empty, or a line is not an answer row; names the file and the
    line.
    """
    lines: list[tuple[int, AnswerRow]] = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    lines.append((number, AnswerRow.from_json(line, f"{path}, line {number}")))
    except FileNotFoundError:
        raise UserError(f"no answer file {path}; give the .jsonl of an inference command") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; give an answer file") from None
    except OSError as error:
        raise UserError(f"cannot read the answer file {path}: {error.strerror}") from None
    if not lines:
        raise UserError(f"{path} holds no answers; run the inference command again")
    return lines


def check_overwritten(file: Path) -> None:
    """Refuse to overwrite a file by a `UserError` if it has no sidecar, and no answer in its first line."""
    with file.open("rb") as content:
        line = content.readline(LONGEST_LINE)
    try:
        if line.strip():
            AnswerRow.from_json(line.decode(), str(file))
    except (UserError, UnicodeDecodeError):
        if not RunRecord.read(file):
            where = f", a link to {file.resolve()}," if file.is_symlink() else ""
            raise UserError(
                f"overwrite: {file}{where} is not an answer file; remove it, or give another file to write to"
            ) from None


def add_category_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `Categories`."""
    parser.add_argument(
        "--question-file",
        metavar="FILE",
        help="the questions that were answered; answers without a category get the category of "
        "their question",
    )
    parser.add_argument(
        "--category-map",
        nargs="+",
        default=[],
        metavar="OLD=NEW",
        help="rename a category, such as math=math_reasoning for GSM8K in files of EAGLE",
    )


def add_tokenizer_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of `load_tokenizer`."""
    parser.add_argument(
        "--tokenizer-path",
        metavar="T",
        help="legacy ruler: count the baseline's tokens from its text with this tokenizer, minus one "
        "a turn, as Spec-Bench's script does (default: the tokens the baseline counted)",
    )


def load_tokenizer(path: str | None) -> Any:
    """Return the tokenizer of a folder, hub name or short name; None without one, a `UserError` if it has none."""
    if path is None:
        return None
    from transformers import AutoTokenizer  # imported late: it takes seconds

    try:
        return AutoTokenizer.from_pretrained(resolve_model(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"no tokenizer at --tokenizer-path {path}: {first_line(error)}") from None


class Categories:
    """Categories of a question file (None: no file), renamed by texts such as `OLD=NEW`; errors as of both."""

    def __init__(
        self, question_file: str | Path | None = None, renames: Sequence[str] = ()
    ) -> None:
        questions = load_questions(Path(question_file)) if question_file else []
        self._by_id = {question.question_id: question for question in questions}
        self._by_turns = {question.turns: question for question in questions}
        self._renamed = category_map(renames)

    def of(self, row: AnswerRow) -> AnswerRow:
        """Return a row with its question's category if it has none, by the new name if there is one.

        A row that holds the turns of its question is found by them: its id may be its place in a run.
        """
        category = row.category
        if not row.has_category:
            turns = row.values.get("turns")
            if turns is None:
                question = self._by_id.get(row.question_id)
            else:
                question = self._by_turns.get(tuple(map(str, turns)))
            category = question.category if question else category
        category = self._renamed.get(category, category)
        return row if category == row.category else row.plus(category=category)
