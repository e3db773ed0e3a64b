"""The row of an answer file (Spec-Bench JSONL): written, read, checked.

Rows come from this repository's inference commands, from Spec-Bench's and from other people's.
Reports therefore check what they read once, here: a row that is not what it should be is one clear
line with the file and the line number, instead of a traceback or a wrong figure. Keys that nobody
here knows stay in a row, and are written again with it.

Use:
    row = AnswerRow.from_json(line, "answers.jsonl, line 3")
    row.is_failed, [choice.new_tokens for choice in row.choices]
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import shortuuid

from evaluation.questions.questions import Question
from model.commands.command_line import UserError
from model.commands.files import parse_json

REQUIRED_KEYS = ("question_id", "category", "choices")
COUNTERS = ("new_tokens", "wall_time", "accept_lengths")
NUMBER_LISTS = (
    *COUNTERS,
    *("decoding_steps", "decode_time", "draft_tokens", "prompt_tokens", "prefill_time", "cpu_time"),
)

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to one turn.

    Attributes:
        token_ids: new tokens, the one that ended the text included.
        accept_lengths: tokens emitted by each step; they sum to the number of new tokens.
        wall_time: seconds for prompt and answer, tokenisation excluded.
        details: further per-turn figures for the answer file, such as prefill_time.
    """

    token_ids: list[int]
    accept_lengths: list[int]
    wall_time: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to a question, with the counters of its turns.

    Attributes:
        values: the JSON object. Lists have one entry a turn, `accept_lengths` one a step; a list
            that the writer left out reads as an empty one, if nothing else is said below.
    """

    values: dict[str, Any]

    @classmethod
    def of_turns(cls, index: int, texts: Sequence[str], turns: Sequence[Turn]) -> Choice:
        """Return the choice that these turns make, in Spec-Bench's form.

        Args:
            index: its place among the choices.
            texts: the text of every turn.
            turns: the turns, at least one; all have the same details.
        """
        values = {
            "index": index,
            "turns": list(texts),
            "decoding_steps": [len(turn.accept_lengths) for turn in turns],
            "new_tokens": [len(turn.token_ids) for turn in turns],
            "wall_time": [turn.wall_time for turn in turns],
            "accept_lengths": [length for turn in turns for length in turn.accept_lengths],
            "token_ids": [turn.token_ids for turn in turns],
        }
        for name in turns[0].details:
            values[name] = [turn.details[name] for turn in turns]
        return cls(values)

    @property
    def turns(self) -> list[str]:
        """The text of every turn."""
        return self.values.get("turns", [])

    @property
    def num_turns(self) -> int:
        """Number of texts; where the writer left them out, of counters."""
        return len(self.values.get("turns", self.new_tokens))

    @property
    def new_tokens(self) -> list[int]:
        """New tokens of every turn."""
        return self.values.get("new_tokens", [])

    @property
    def wall_time(self) -> list[float]:
        """Seconds for prompt and answer."""
        return self.values.get("wall_time", [])

    @property
    def decode_time(self) -> list[float]:
        """Seconds without the prompt; NaN where the writer did not time them."""
        return self.values.get("decode_time", [math.nan])

    @property
    def prompt_tokens(self) -> list[int]:
        """Tokens of every prompt."""
        return self.values.get("prompt_tokens", [])

    @property
    def prefill_time(self) -> list[float]:
        """Seconds of every prompt."""
        return self.values.get("prefill_time", [])

    @property
    def cpu_time(self) -> list[float]:
        """CPU seconds of the process for prompt and answer; NaN where the writer did not count them."""
        return self.values.get("cpu_time", [math.nan])

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens of every step of all turns."""
        return self.values.get("accept_lengths", [])

    @property
    def decoding_steps(self) -> list[int]:
        """Number of steps of every turn."""
        return self.values.get("decoding_steps", [])

    @property
    def draft_tokens(self) -> list[float]:
        """Drafted nodes; NaN where the writer did not count them."""
        return self.values.get("draft_tokens", [math.nan])

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of every turn."""
        return self.values.get("token_ids") or []

    @property
    def has_token_ids(self) -> bool:
        """Whether the writer has token ids at all, of whatever content."""
        return "token_ids" in self.values

    @property
    def drafted(self) -> list[list[list[int]]]:
        """Drafted nodes of every turn, by [depth - 1][rank]."""
        return self.values.get("drafted", [])

    @property
    def accepted(self) -> list[list[list[int]]]:
        """Accepted nodes of every turn, by [depth - 1][rank]."""
        return self.values.get("accepted", [])

    @property
    def sources(self) -> list[dict[str, list[int]]]:
        """Drafted and accepted nodes of every turn, by source."""
        return self.values.get("sources", [])

    @property
    def step_times(self) -> list[dict[str, float]]:
        """Seconds of every turn, by part of a step."""
        return self.values.get("step_times", [])

    @property
    def missing_counters(self) -> list[str]:
        """The counters that every figure needs and the writer left out."""
        return [key for key in COUNTERS if key not in self.values]

    def prompt_length(self, turn: int) -> int | None:
        """Return the tokens of a turn's prompt, None if the writer did not count them."""
        counts: list[int] | None = self.values.get("prompt_tokens")
        return None if counts is None else counts[turn]


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """The answers to one question, or the failure to answer it.

    Attributes:
        values: the JSON object, keys that nobody here knows included.
    """

    values: dict[str, Any]

    @classmethod
    def of_question(
        cls, question: Question, model_id: str, choices: Sequence[Choice], error: str | None
    ) -> AnswerRow:
        """Return the new row of a question.

        Args:
            question: the question.
            model_id: name of the run.
            choices: the answers; none if it failed.
            error: why it failed; None, and no key of the row, if it did not.
        """
        values = {
            "question_id": question.question_id,
            "category": question.category,
            "answer_id": shortuuid.uuid(),
            "model_id": model_id,
            "choices": [choice.values for choice in choices],
            "tstamp": time.time(),
        }
        return cls(values if error is None else {**values, "error": error})

    @classmethod
    def from_json(cls, line: str, where: str) -> AnswerRow:
        """Read a row, and check the types that reports rely on.

        Args:
            line: one line of an answer file.
            where: file and line, for errors.

        Raises:
            UserError: if it is not an answer row.
        """
        try:
            values = parse_json(line, where)
        except UserError as error:
            raise UserError(f"{error}; mend or delete the line") from None
        _check_row(values, where)
        return cls(values)

    def to_json(self, allow_nan: bool = True) -> str:
        """Return the line of an answer file, without its end.

        Raises:
            ValueError: if it holds NaN or an infinity, and `allow_nan` is off.
        """
        return json.dumps(self.values, allow_nan=allow_nan)

    def plus(self, **keys: Any) -> AnswerRow:
        """Return the row with further keys, or other values of keys that it has."""
        return AnswerRow({**self.values, **keys})

    @property
    def question_id(self) -> int | str:
        """The question."""
        return self.values["question_id"]

    @property
    def category(self) -> str:
        """Its category."""
        return self.values["category"]

    @property
    def choices(self) -> list[Choice]:
        """The answers; none where the question failed."""
        return [Choice(values) for values in self.values["choices"]]

    @property
    def model_id(self) -> str | None:
        """The name of the run."""
        return self.values.get("model_id")

    @property
    def error(self) -> str | None:
        """Why the question failed; None if no error is told."""
        return self.values.get("error")

    @property
    def is_failed(self) -> bool:
        """Whether it records a failure: an error, no choice, or no counted turn."""
        choices = self.choices
        return self.error is not None or not choices or not choices[0].new_tokens


def _check_row(row: object, where: str) -> None:
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


# The types of a choice's keys, where it has them: those of Spec-Bench, and optional ones of ours.
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
