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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import shortuuid
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PrivateAttr,
    SkipValidation,
    ValidationError,
)
from typing_extensions import Self

from evaluation.questions.questions import UNCATEGORISED, Question
from model.commands.command_line import UserError
from model.commands.files import parse_json

REQUIRED_KEYS = ("question_id", "choices")
# The text that Spec-Bench's writer records for a turn that raised an error.
ERROR_TEXT = "ERROR"
# A float, or a whole number that can become one.
LARGEST = int(sys.float_info.max)
Number = Annotated[int, Field(ge=-LARGEST, le=LARGEST)] | float
NUMBERS: Any = Field([], description="a list of numbers")
# Figures that are not known are NaN in sums.
UNKNOWN_NUMBERS: Any = Field([math.nan], description="a list of numbers")
TEXTS: Any = Field([], description="a list of texts")
TREE_COUNTS: Any = Field([], description="a list of counts [depth][rank] for each turn")
# Some writers' counts are floats, and stay what they are.
Counts = Annotated[list[int], GetPydanticSchema(lambda _, handler: handler(list[Number]))]
Numbers = Annotated[list[float], GetPydanticSchema(lambda _, handler: handler(list[Number]))]
TokenIds = Annotated[list[list[int]], BeforeValidator(lambda value: [] if value is None else value)]
Pair = Annotated[list[int], Field(min_length=2, max_length=2)]


class JsonObject(BaseModel):
    """An object of a JSON file: keys that somebody relies on are attributes, and checked; `values` has all keys."""

    model_config = ConfigDict(strict=True, frozen=True)
    _values: dict[str, Any] = PrivateAttr()

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Return what holds these keys; a `ValueError` names the first key with a wrong value."""
        try:
            found = cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(cls._complaint(error, values)) from None
        found._values = values
        return found

    @property
    def values(self) -> dict[str, Any]:
        return self._values

    @classmethod
    def _complaint(cls, error: ValidationError, values: dict[str, Any]) -> str:
        found = error.errors()
        first = next((one for one in found if one["type"] == "missing"), found[0])
        key = str(first["loc"][0])
        if first["type"] == "missing":
            return f"no {key!r}; an answer has {', '.join(REQUIRED_KEYS)}"
        if first["type"] == "value_error":
            return str(first["ctx"]["error"])
        return f"{key} is {cls.model_fields[key].description}, got {_short(values[key])}"


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to one turn."""

    token_ids: list[int]  # new tokens, the one that ended the text included
    # Tokens emitted by each step; they sum to the number of new tokens. None: `details` has decoding_steps alone.
    accept_lengths: list[int] | None
    wall_time: float  # seconds for prompt and answer, tokenisation excluded
    # Further per-turn figures for the answer file, such as prefill_time.
    details: dict[str, Any] = field(default_factory=dict)


class Choice(JsonObject):
    """One of the answers to a question, with the counters of its turns.

    Lists have one entry a turn. A list that the writer left out reads as an empty one, or as NaN where figures sum
    it up.
    """

    turns: list[str] = TEXTS
    new_tokens: Counts = NUMBERS
    wall_time: Numbers = NUMBERS  # seconds for prompt and answer
    # Of these, the part that was spent on this answer, where several were under way at a time.
    share_time: Numbers = NUMBERS
    accept_lengths: Counts = NUMBERS  # of every step of all turns
    decoding_steps: Counts = NUMBERS
    # In files of EAGLE, Medusa and FastChat: the index of the last step, from 0.
    idxs: Counts = NUMBERS
    # Seconds without the prompt: of the share, where there is one.
    decode_time: Numbers = UNKNOWN_NUMBERS
    draft_tokens: Numbers = UNKNOWN_NUMBERS
    prompt_tokens: Counts = NUMBERS
    prefill_time: Numbers = NUMBERS
    cpu_time: Numbers = UNKNOWN_NUMBERS  # of the process, prompt and answer
    # What a client saw of a server, in seconds and tokens of every turn.
    time_to_first_token: Numbers = NUMBERS
    cached_tokens: Counts = NUMBERS  # of the prompt, from a prefix cache
    # [name, arguments] of every call of every turn, arguments as generated.
    tool_calls: list[list[list[str]]] = Field(
        [], description="a list of calls [name, arguments] for each turn"
    )
    reasoning: list[str] = TEXTS
    token_ids: TokenIds = Field([], description="a list of token ids for each turn")
    # Drafted and accepted nodes of every turn, by [depth - 1][rank].
    drafted: list[list[list[int]]] = TREE_COUNTS
    accepted: list[list[list[int]]] = TREE_COUNTS
    sources: list[dict[str, Pair]] = Field(
        [], description="an object {name: [drafted, accepted]} for each turn"
    )
    # Nodes that each step of a turn drafted, roots excluded.
    step_nodes: list[list[int]] = Field([], description="a list of counts for each turn")
    # Of a server's answers: vLLM's `metrics.speculative_decoding` for each turn.
    speculative_decoding: list[dict[str, Any]] = Field([], description="an object for each turn")
    step_times: list[dict[str, Number]] = Field(
        [], description="an object of seconds for each turn"
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
        return cls.of(values)

    @property
    def num_turns(self) -> int:
        """Number of texts; where the writer left them out, of counters."""
        return len(self.values.get("turns", self.new_tokens))

    @property
    def has_token_ids(self) -> bool:
        """Whether the writer has token ids at all, of whatever content."""
        return "token_ids" in self.values

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


def _choices(value: Any) -> list[Choice]:
    if not isinstance(value, list) or not all(isinstance(choice, dict) for choice in value):
        raise ValueError(f"choices is a list of objects, got {_short(value)}")
    return [Choice.of(choice) for choice in value]


class AnswerRow(JsonObject):
    """The answers to one question, or the failure to answer it."""

    question_id: int | str = Field(description="a whole number or a text")
    # Of the question; `UNCATEGORISED` where the writer gave none.
    category: Annotated[str, AfterValidator(lambda value: value or UNCATEGORISED)] = Field(
        UNCATEGORISED, description="a text"
    )
    turns: list[Any] = Field([], description="the list of the question's turns")
    choices: Annotated[list[Choice], BeforeValidator(_choices)]  # none where the question failed
    model_id: SkipValidation[str | None] = None
    error: SkipValidation[str | None] = None  # why the question failed

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
        return cls.of(values if error is None else {**values, "error": error})

    @classmethod
    def from_json(cls, line: str, where: str) -> AnswerRow:
        """Read a line of an answer file, and check the types that reports rely on.

        `where` is file and line, for errors. A `UserError` if it is not an answer row.
        """
        try:
            values = parse_json(line, where)
        except UserError as error:
            raise UserError(f"{error}; correct or delete the line") from None
        if not isinstance(values, dict):
            raise UserError(f"{where}: an answer is a JSON object, got {type(values).__name__}")
        try:
            return cls.of(values)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None

    def to_json(self, allow_nan: bool = True) -> str:
        """Return the line of an answer file, without its end.

        A `ValueError` if it holds NaN or an infinity, and `allow_nan` is off.
        """
        return json.dumps(self.values, allow_nan=allow_nan)

    def plus(self, **keys: Any) -> AnswerRow:
        """Return the row with further keys, or other values of keys that it has."""
        return AnswerRow.of({**self.values, **keys})

    @property
    def has_category(self) -> bool:
        return bool(self.values.get("category"))

    @property
    def is_failed(self) -> bool:
        """Whether it records a failure: an error, no choice, or no turn, counted or as a text."""
        choices = self.choices
        is_empty = not choices or not choices[0].values.get("new_tokens", choices[0].turns)
        return self.error is not None or is_empty


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
