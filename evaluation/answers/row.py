"""The row of an answer file (Spec-Bench JSONL): written, read, checked.

Rows come from this repository's inference commands, from Spec-Bench's and from other people's.
Reports check here, once, what they read: a wrong row is one clear line with the file and the line
number, instead of a traceback or a wrong figure. Unknown keys stay in a row, and are written again.

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
from typing import Any, Generic, TypeVar

import shortuuid

from evaluation.questions.questions import UNCATEGORISED, Question
from model.commands.command_line import UserError
from model.commands.files import parse_json

REQUIRED_KEYS = ("question_id", "choices")
COUNTERS = ("new_tokens", "wall_time")
# The text that Spec-Bench's writer records for a turn that raised an error.
ERROR_TEXT = "ERROR"
T = TypeVar("T")
Check = Callable[[Any], bool]


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


class JsonKey(Generic[T]):
    """A key of a JSON object, as an attribute of the class that holds the object as `values`.

    Args:
        default: the value where the key is missing or null.
        is_right: whether a value has the right type; None: nobody relies on it.
        what: the right type in words.
    """

    def __init__(self, default: T, is_right: Check | None = None, what: str = "") -> None:
        self.default = default
        self.is_right = is_right
        self.what = what

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, holder: Any, owner: type) -> T:
        value = holder.values.get(self.name)
        return self.default if value is None else value


NUMBERS = (_list_of(_is_number), "a list of numbers")
TREE_COUNTS = (
    _list_of(_list_of(_list_of(_is_integer))),
    "a list of counts [depth][rank] for each turn",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to one turn."""

    token_ids: list[int]  # new tokens, the one that ended the text included
    # Tokens emitted by each step; they sum to the number of new tokens. None: `details` has decoding_steps alone.
    accept_lengths: list[int] | None
    wall_time: float  # seconds for prompt and answer, tokenisation excluded
    # Further per-turn figures for the answer file, such as prefill_time.
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to a question, with the counters of its turns.

    The lists of `values`, the JSON object, have one entry a turn. A list that the writer left out
    reads as an empty one, or as NaN where figures sum it up.
    """

    values: dict[str, Any]

    turns = JsonKey[list[str]]([], _list_of(_is_text), "a list of texts")
    new_tokens = JsonKey[list[int]]([], *NUMBERS)
    wall_time = JsonKey[list[float]]([], *NUMBERS)  # seconds for prompt and answer
    # Of these, the part that was spent on this answer, where several were under way at a time.
    share_time = JsonKey[list[float]]([], *NUMBERS)
    accept_lengths = JsonKey[list[int]]([], *NUMBERS)  # of every step of all turns
    decoding_steps = JsonKey[list[int]]([], *NUMBERS)
    # In files of EAGLE, Medusa and FastChat: the index of the last step, from 0.
    idxs = JsonKey[list[int]]([], *NUMBERS)
    # Seconds without the prompt: of the share, where there is one.
    decode_time = JsonKey[list[float]]([math.nan], *NUMBERS)
    draft_tokens = JsonKey[list[float]]([math.nan], *NUMBERS)
    prompt_tokens = JsonKey[list[int]]([], *NUMBERS)
    prefill_time = JsonKey[list[float]]([], *NUMBERS)
    cpu_time = JsonKey[list[float]]([math.nan], *NUMBERS)  # of the process, prompt and answer
    # What a client saw of a server, in seconds and tokens of every turn.
    time_to_first_token = JsonKey[list[float]]([], *NUMBERS)
    cached_tokens = JsonKey[list[int]]([], *NUMBERS)  # of the prompt, from a prefix cache
    # [name, arguments] of every call of every turn, arguments as generated.
    tool_calls = JsonKey[list[list[list[str]]]](
        [],
        _list_of(_list_of(_list_of(_is_text))),
        "a list of calls [name, arguments] for each turn",
    )
    reasoning = JsonKey[list[str]]([], _list_of(_is_text), "a list of texts")
    token_ids = JsonKey[list[list[int]]](
        [],
        lambda value: value is None or _list_of(_list_of(_is_integer))(value),
        "a list of token ids for each turn",
    )
    # Drafted and accepted nodes of every turn, by [depth - 1][rank].
    drafted = JsonKey[list[list[list[int]]]]([], *TREE_COUNTS)
    accepted = JsonKey[list[list[list[int]]]]([], *TREE_COUNTS)
    sources = JsonKey[list[dict[str, list[int]]]](
        [], _list_of(_object_of(_is_pair)), "an object {name: [drafted, accepted]} for each turn"
    )
    # Nodes that each step of a turn drafted, roots excluded.
    step_nodes = JsonKey[list[list[int]]](
        [], _list_of(_list_of(_is_integer)), "a list of counts for each turn"
    )
    # Of a server's answers: vLLM's `metrics.speculative_decoding` for each turn.
    speculative_decoding = JsonKey[list[dict[str, Any]]](
        [], _list_of(lambda value: isinstance(value, dict)), "an object for each turn"
    )
    step_times = JsonKey[list[dict[str, float]]](
        [], _list_of(_object_of(_is_number)), "an object of seconds for each turn"
    )

    @classmethod
    def of_turns(cls, index: int, texts: Sequence[str], turns: Sequence[Turn]) -> Choice:
        """Return the choice at an index that these turns, one or more, make in Spec-Bench's form.

        All turns have the same details.
        """
        values = {
            "index": index,
            "turns": list(texts),
            "decoding_steps": [len(turn.accept_lengths or ()) for turn in turns],
            "new_tokens": [len(turn.token_ids) for turn in turns],
            "wall_time": [turn.wall_time for turn in turns],
            "accept_lengths": [length for turn in turns for length in turn.accept_lengths or ()],
            "token_ids": [turn.token_ids for turn in turns],
        }
        if turns[0].accept_lengths is None:
            del values["accept_lengths"]
        for name in turns[0].details:
            values[name] = [turn.details[name] for turn in turns]
        return cls(values)

    @property
    def num_turns(self) -> int:
        """Number of texts; where the writer left them out, of counters."""
        return len(self.values.get("turns", self.new_tokens))

    @property
    def has_token_ids(self) -> bool:
        """Whether the writer has token ids at all, of whatever content."""
        return "token_ids" in self.values

    @property
    def missing_counters(self) -> list[str]:
        """The counters that every figure needs and the writer left out."""
        return [key for key in COUNTERS if key not in self.values]

    @property
    def is_uncounted(self) -> bool:
        """Whether there are texts, and the writer counted no token of any."""
        has_text = any(text.strip() not in ("", ERROR_TEXT) for text in self.turns)
        return has_text and not any(self.new_tokens)

    @property
    def num_steps(self) -> float:
        """Steps of all turns; NaN where the writer counted none."""
        if "accept_lengths" in self.values:
            return len(self.accept_lengths)
        counts = self.decoding_steps or [index + 1 for index in self.idxs]
        return sum(counts) if counts else math.nan

    @property
    def num_accepted(self) -> float:
        """Tokens that the steps of all turns emitted; NaN where the writer counted no steps or no tokens."""
        if "accept_lengths" in self.values:
            return sum(self.accept_lengths)
        return math.nan if math.isnan(self.num_steps) else sum(self.new_tokens) or math.nan

    @property
    def seconds(self) -> float:
        """Seconds spent on all turns, which add up to those of the run."""
        return sum(self.share_time or self.wall_time)

    def prompt_length(self, turn: int) -> int | None:
        """Return the tokens of a turn's prompt, None if the writer did not count them."""
        counts: list[int] | None = self.values.get("prompt_tokens")
        return None if counts is None else counts[turn]


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """The answers to one question, or the failure to answer it.

    `values` is the JSON object, unknown keys included.
    """

    values: dict[str, Any]

    model_id = JsonKey[str | None](None)
    error = JsonKey[str | None](None)  # why the question failed

    @classmethod
    def of_question(
        cls, question: Question, model_id: str, choices: Sequence[Choice], error: str | None
    ) -> AnswerRow:
        """Return the new row of a question; `error` says why it failed, and is no key of the row if None."""
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
        """Read a line of an answer file, and check the types that reports rely on.

        `where` is file and line, for errors.

        Raises:
            UserError: if it is not an answer row.
        """
        try:
            values = parse_json(line, where)
        except UserError as error:
            raise UserError(f"{error}; correct or delete the line") from None
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
        return self.values["question_id"]

    @property
    def has_category(self) -> bool:
        return bool(self.values.get("category"))

    @property
    def category(self) -> str:
        """The question's category; `UNCATEGORISED` where the writer gave none."""
        return self.values.get("category") or UNCATEGORISED

    @property
    def choices(self) -> list[Choice]:
        """The answers; none where the question failed."""
        return [Choice(values) for values in self.values["choices"]]

    @property
    def is_failed(self) -> bool:
        """Whether it records a failure: an error, no choice, or no turn, counted or as a text."""
        choices = self.choices
        is_empty = not choices or not choices[0].values.get("new_tokens", choices[0].turns)
        return self.error is not None or is_empty


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
    if not _is_text(row.get("category", "")):
        raise UserError(f"{where}: category is a text, got {_short(row['category'])}")
    if not isinstance(row.get("turns", []), list):
        raise UserError(
            f"{where}: turns is the list of the question's turns, got {_short(row['turns'])}"
        )
    _check_choices(row["choices"], where)


def _check_choices(choices: object, where: str) -> None:
    """Check the types that reports rely on; keys may be missing, their reader says so."""
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise UserError(f"{where}: choices is a list of objects, got {_short(choices)}")
    for choice in choices:
        for key in vars(Choice).values():
            if not isinstance(key, JsonKey) or key.is_right is None or key.name not in choice:
                continue
            if not key.is_right(value := choice[key.name]):
                raise UserError(f"{where}: {key.name} is {key.what}, got {_short(value)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
