"""The questions of a recording: a benchmark's, or some of each of several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.inference.config import QuestionOptions
from evaluation.questions.questions import Question, load_questions, question_file_of, spread
from model.commands.command_line import UserError
from model.commands.options import config_of

# Options that --mix stands for.
QUESTIONS = ("bench_name", "question_file", "num_questions")


@dataclass(frozen=True, slots=True)
class Part:
    """Questions from one file."""

    words: str  # as it was given: `NAME[:CATEGORY][=COUNT]`, NAME a benchmark or a file
    name: str  # of the benchmark or file
    file: Path  # the question file
    category: str  # the only one that is asked; empty for all
    count: int | None  # how many questions, evenly spread over the file; None for all

    @classmethod
    def of(cls, words: str) -> Part:
        """Read a part of `--mix`.

        Raises:
            UserError: if the count is not a number above 0, or the file is not there.
        """
        origin, _, number = words.partition("=")
        if "=" in words and not (number.isdecimal() and int(number)):
            raise UserError(
                f"mix: got {words!r}; allowed: NAME[:CATEGORY][=COUNT], COUNT 1 or more"
            )
        given, _, category = origin.partition(":")
        file = question_file_of(given, given if given.endswith(".jsonl") else None)
        return cls(words, name_of(file), file, category, int(number or 0) or None)

    @property
    def title(self) -> str:
        """It in words, for a page."""
        category = f" ({self.category})" if self.category else ""
        return f"{self.count or 'all'} of {self.name}{category}"

    def questions(self, taken: set[tuple[str, ...]]) -> list[Question]:
        """Return the questions that are not taken yet; their ids begin with the name.

        Raises:
            UserError: if there are not so many.
        """
        found = [
            question
            for question in load_questions(self.file)
            if question.turns not in taken and self.category in ("", question.category)
        ]
        count = self.count or len(found)
        if not found or count > len(found):
            raise UserError(f"mix: got {self.words!r}; {self.file} has {len(found)} such questions")
        return [
            replace(question, question_id=f"{self.name}-{question.question_id}")
            for question in spread(found, count)
        ]


def asked_questions(args: argparse.Namespace) -> list[Question]:
    """Return the questions that the options ask.

    Raises:
        UserError: if there is no such file, or `--mix` is not alone.
    """
    asked = config_of(QuestionOptions, vars(args))
    if not args.mix:
        return load_questions(_file(args), count=asked.num_questions)
    for name in QUESTIONS:
        if name in vars(args):
            raise UserError(
                f"{name}: got {getattr(args, name)} with --mix, which sets it; leave one out"
            )
    return mixed(args.mix)


def mixed(parts: Sequence[str]) -> list[Question]:
    """Return the questions of all parts, one after the other, none twice."""
    questions: list[Question] = []
    for words in parts:
        questions += Part.of(words).questions({question.turns for question in questions})
    if len({question.question_id for question in questions}) < len(questions):
        raise UserError(f"mix: got {' '.join(parts)}; two questions have the same name and number")
    return questions


def question_files(args: argparse.Namespace) -> list[Path]:
    if args.mix:
        return [Part.of(words).file for words in args.mix]
    return [_file(args)]


def title_of(args: argparse.Namespace) -> str:
    """Return the questions in words, for a page."""
    if args.mix:
        return ", ".join(Part.of(words).title for words in args.mix)
    return name_of(_file(args))


def _file(args: argparse.Namespace) -> Path:
    asked = config_of(QuestionOptions, vars(args))
    return question_file_of(asked.bench_name, asked.question_file)


def name_of(file: Path) -> str:
    """Return the name of a question file: its benchmark's, if it lies in a folder of that name."""
    return file.parent.name if file.name == "question.jsonl" else file.name
