"""Where two answer files begin to differ, question by question, and whether a method's answers are the baseline's.

Token ids are compared where both files carry them; else text, reasoning, and tool calls with their arguments. Rows
are matched by question id; a row that one file lacks and a question that failed in one of them are differences. A
question that failed in both has no answers to compare: it is neither equal nor different, and never skipped.

Without equal answers a speed-up says nothing. Greedy decoding in float32 or wider gives equal tokens, or the method
is not lossless. In half precision two nearly equal logits may change places: there, and in files whose conditions
are not known, differences are counted; `evaluation.equal --model-path` judges them, and its verdict is kept beside
the method's file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from evaluation.answers.record import RunRecord
from evaluation.answers.row import ERROR_TEXT, AnswerRow, Choice
from model.commands.files import file_hash, write_whole

TOKENS_AROUND = 5
CHARACTERS_AROUND = 30


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the answers to one question first differ; indices count from 0."""

    question_id: int | str
    category: str
    cause: str  # what differs, in words
    choice: int | None = None  # index of the choice, None if the whole row differs
    turn: int | None = None  # index of the turn, None if the whole choice or row differs
    # What `position` counts, `token` or `character`; None without a position.
    unit: str | None = None
    position: int | None = None  # first differing token or character in the turn
    # The first file's and the second's tokens or characters around it.
    excerpts: tuple[str, str] | None = None
    # The two texts around their first differing character, if token ids were compared.
    texts: tuple[str, str] | None = None
    # Whether both have a token at the position: neither ends before it.
    parts_at_tokens: bool = False
    is_failure: bool = False  # whether neither file has an answer there


@dataclass(slots=True)
class Comparison:
    """The result of comparing two files: counts, and one difference for each differing question.

    `failures` are questions, not among these, to which neither file has every answer.
    """

    num_questions: int
    num_turns_by_ids: int
    num_turns_by_text: int
    differences: list[Difference]
    failures: list[Difference]

    @property
    def num_turns(self) -> int:
        return self.num_turns_by_ids + self.num_turns_by_text


def compare_answers(rows: Sequence[AnswerRow], other_rows: Sequence[AnswerRow]) -> Comparison:
    """Compare two files' rows, in the first file's order and then what only the second holds.

    A turn counts as compared even if an earlier one of its question differs already.
    """
    by_id = {row.question_id: row for row in rows}
    other_by_id = {row.question_id: row for row in other_rows}
    every = by_id | {key: row for key, row in other_by_id.items() if key not in by_id}
    comparison = Comparison(len(every), 0, 0, [], [])
    for question_id, present in every.items():
        row, other = by_id.get(question_id), other_by_id.get(question_id)
        cause = _row_cause(row, other)
        if cause or row is None or other is None:
            is_failure = bool(row and other and row.is_failed and other.is_failed)
            difference = Difference(question_id, present.category, cause, is_failure=is_failure)
        else:
            found = _answer_difference(row, other, comparison)
            if found is None:
                continue
            difference = found
        kind = comparison.failures if difference.is_failure else comparison.differences
        kind.append(difference)
    return comparison


def _row_cause(row: AnswerRow | None, other: AnswerRow | None) -> str:
    """Say why two rows differ before their answers are compared; empty if they do not."""
    cause = ""
    if row is None or other is None:
        cause = f"the question is missing in the {'first' if row is None else 'second'} file"
    elif row.is_failed or other.is_failed:
        failed = [word for word, it in (("first", row), ("second", other)) if it.is_failed]
        errors = " and ".join(str(it.error) for it in (row, other) if it.error)
        cause = f"the question failed in the {' and the '.join(failed)} file"
        cause += f" ({errors})" if errors else ""
    elif row.has_category and other.has_category and row.category != other.category:
        cause = (
            f"the category is {row.category!r} in the first, {other.category!r} in the second file"
        )
    elif len(row.choices) != len(other.choices):
        cause = f"{len(row.choices)} choices against {len(other.choices)}"
    return cause


def _answer_difference(
    row: AnswerRow, other: AnswerRow, comparison: Comparison
) -> Difference | None:
    """Return the first difference in the answers, else the first failure; count the turns that were compared."""
    first: Difference | None = None
    failure: Difference | None = None
    pairs = zip(row.choices, other.choices, strict=True)
    for choice_index, (choice, other_choice) in enumerate(pairs):
        where: dict[str, Any] = {
            "question_id": row.question_id,
            "category": row.category,
            "choice": choice_index,
        }
        texts, other_texts = _texts(choice), _texts(other_choice)
        if not texts and not other_texts:
            cause = "neither file has a turn to compare"
            failure = failure or Difference(**where, cause=cause, is_failure=True)
        if len(texts) != len(other_texts):
            cause = f"{len(texts)} turns against {len(other_texts)}"
            first = first or Difference(**where, cause=cause)
            continue
        has_ids = len(texts) == len(choice.token_ids) == len(other_choice.token_ids)
        for turn, (text, other_text) in enumerate(zip(texts, other_texts, strict=True)):
            if not has_ids and text == other_text == ERROR_TEXT:
                cause = f"the turn is {ERROR_TEXT!r} in both files: it raised an error"
                failure = failure or Difference(**where, turn=turn, cause=cause, is_failure=True)
                continue
            found: dict[str, Any] | None
            if has_ids:
                comparison.num_turns_by_ids += 1
                ids, other_ids = choice.token_ids[turn], other_choice.token_ids[turn]
                found = _token_difference(ids, other_ids, (text, other_text))
                if found and text == other_text:
                    beside = _difference_beside_text(choice, other_choice, turn)
                    if beside:
                        cause = f"tokens differ: {beside['cause']}"
                        found |= {"cause": cause, "texts": beside["excerpts"]}
            else:
                comparison.num_turns_by_text += 1
                found = _character_difference("texts differ", text, other_text)
                found = found or _difference_beside_text(choice, other_choice, turn)
            if found:
                first = first or Difference(**where, turn=turn, **found)
    return first or failure


def _texts(choice: Choice) -> list[str]:
    """The text of every turn; empty ones where a file has token ids alone."""
    return choice.turns or [""] * len(choice.token_ids)


def _token_difference(
    ids: list[int], other_ids: list[int], texts: tuple[str, str]
) -> dict[str, Any] | None:
    if ids == other_ids:
        return None
    position = first_difference(ids, other_ids)
    place = first_difference(*texts)
    return {
        "cause": "tokens differ",
        "unit": "token",
        "position": position,
        "excerpts": (_tokens_around(ids, position), _tokens_around(other_ids, position)),
        "texts": (_text_around(texts[0], place), _text_around(texts[1], place)),
        "parts_at_tokens": position < min(len(ids), len(other_ids)),
    }


def _character_difference(cause: str, text: str, other_text: str) -> dict[str, Any] | None:
    if text == other_text:
        return None
    position = first_difference(text, other_text)
    excerpts = (_text_around(text, position), _text_around(other_text, position))
    return {"cause": cause, "unit": "character", "position": position, "excerpts": excerpts}


def _difference_beside_text(choice: Choice, other: Choice, turn: int) -> dict[str, Any] | None:
    """Return where two turns differ in the thoughts before the text, or in tool calls; absent ones are empty."""

    def of(values: list[Any]) -> Any:
        return values[turn] if turn < len(values) else []

    parts = [("reasonings", of(choice.reasoning) or "", of(other.reasoning) or "")]
    calls = zip_longest(of(choice.tool_calls), of(other.tool_calls), fillvalue=("", ""))
    for index, (mine, theirs) in enumerate(calls):
        name = mine[0] or theirs[0]
        parts.append((f"names of tool call {index}", mine[0], theirs[0]))
        parts.append((f"arguments of tool call {index} ({name})", mine[1], theirs[1]))
    found = (_character_difference(f"{what} differ", *pair) for what, *pair in parts)
    return next(filter(None, found), None)


def first_difference(values: Sequence[Any], other_values: Sequence[Any]) -> int:
    """Index of the first differing element; the shorter length if one is a prefix of the other."""
    pairs = enumerate(zip(values, other_values, strict=False))
    shorter = min(len(values), len(other_values))
    return next((index for index, (one, other) in pairs if one != other), shorter)


def _tokens_around(ids: list[int], position: int) -> str:
    start = max(0, position - TOKENS_AROUND)
    end = position + 1 + TOKENS_AROUND
    words = [
        f"[{token}]" if start + i == position else str(token)
        for i, token in enumerate(ids[start:end])
    ]
    if position >= len(ids):
        words.append("[end]")
    return " ".join(["..."] * (start > 0) + words + ["..."] * (end < len(ids)))


def _text_around(text: str, position: int) -> str:
    start = max(0, position - CHARACTERS_AROUND)
    end = position + 1 + CHARACTERS_AROUND
    before, after = repr(text[start:position]), repr(text[position:end])
    here = after if position < len(text) else "[end]"
    return f"{'... ' * (start > 0)}{before} then {here}{' ...' * (end < len(text))}"


@dataclass(frozen=True, slots=True)
class Equality:
    """How many answers of a method are the baseline's, over all its runs."""

    num_compared: int = 0  # questions that both sides answered
    num_differing: int = 0  # of these, questions whose answers differ
    num_by_text: int = 0  # of those compared, questions of which a side has no tokens
    must_be_equal: bool = False  # whether any difference is an error
    # Of the differing questions, those that `evaluation.equal` judged a near-tie that rounding decided; None where
    # it was not asked about every one.
    num_ties: int | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the method is not lossless: answers differ that must be equal, or that were judged a bug."""
        num_bugs = 0 if self.num_ties is None else self.num_differing - self.num_ties
        return bool(num_bugs or (self.must_be_equal and self.num_differing))

    @property
    def is_lossless(self) -> bool | None:
        """Whether all answers are the baseline's, but for judged near-ties; None while nobody knows."""
        if self.is_broken:
            return False
        is_known = self.num_compared and self.num_differing == (self.num_ties or 0)
        return True if is_known else None

    def __str__(self) -> str:
        if not self.num_compared:
            return "-"
        judged = ""
        if self.num_ties is not None:
            num_bugs = self.num_differing - self.num_ties
            judged = (
                f" ({self.num_ties} near-ties, {num_bugs} bugs)" if num_bugs else " (near-ties)"
            )
        return f"{self.num_differing} of {self.num_compared}{judged}"

    def plus(self, other: Equality) -> Equality:
        """Return both as one; ties are known only if both know them."""
        parts = (self, other)
        ties = [part.num_ties if part.num_differing else 0 for part in parts]
        known = [count for count in ties if count is not None]
        is_judged = len(known) == 2 and any(part.num_ties is not None for part in parts)
        return Equality(
            self.num_compared + other.num_compared,
            self.num_differing + other.num_differing,
            self.num_by_text + other.num_by_text,
            self.must_be_equal or other.must_be_equal,
            sum(known) if is_judged else None,
        )


def equality_of(
    rows: Sequence[AnswerRow],
    record: RunRecord,
    base_rows: Sequence[AnswerRow],
    base_record: RunRecord,
    num_ties: int | None = None,
) -> Equality:
    """Compare a file's answers with the baseline's; nothing is compared where answers were sampled.

    A question that failed on a side is left out. `num_ties` differences were judged near-ties; None: not judged.
    """
    records = (record, base_record)
    if any(one.is_greedy is False for one in records):
        return Equality()
    sides = [
        {row.question_id: row for row in side if not row.is_failed} for side in (rows, base_rows)
    ]
    common = [key for key in sides[0] if key in sides[1]]
    found = compare_answers(*([side[key] for key in common] for side in sides))
    by_text = sum(
        not all(choice.has_token_ids for side in sides for choice in side[key].choices)
        for key in common
    )
    must_be_equal = all(one.is_greedy and one.dtype in ("float32", "float64") for one in records)
    return Equality(len(common), len(found.differences), by_text, must_be_equal, num_ties)


def verdict_path(path: str | Path) -> Path:
    """Return where the verdict of `evaluation.equal` on an answer file lies: `ANSWERS.equal.json`."""
    return Path(path).with_name(Path(path).name.removesuffix(".jsonl") + ".equal.json")


def write_verdict(path: str | Path, base_path: str | Path, num_ties: int, num_bugs: int) -> None:
    """Keep what was judged beside an answer file; a `UserError` if it cannot be written."""
    verdict = {
        "sha256": file_hash(Path(path)),
        "base_sha256": file_hash(Path(base_path)),
        "ties": num_ties,
        "bugs": num_bugs,
    }
    write_whole(verdict_path(path), json.dumps(verdict, indent=2) + "\n")


def read_ties(path: str | Path, base_path: str | Path) -> int | None:
    """Return how many differences were judged near-ties; None if these two files, as they are, were not judged."""
    try:
        verdict = json.loads(verdict_path(path).read_text(encoding="utf-8"))
        hashes = [verdict["sha256"], verdict["base_sha256"]]
        num_ties = int(verdict["ties"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        found = [file_hash(Path(path)), file_hash(Path(base_path))]
    except OSError:
        return None
    return num_ties if hashes == found else None
