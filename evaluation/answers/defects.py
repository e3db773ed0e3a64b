"""Find defects in the rows of answer files, and say what each does to figures.

Answer files of any writer are read as they are, and some carry rows that measure nothing: a turn
"ERROR" with the counters of the turn before it, times of zero, tokens past the limit, questions
answered twice or not at all. Each defect has an effect on the figures (`scoring/figures.py`): it is
only listed, it keeps the row out of the exact figures, or out of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from evaluation.answers.record import RunRecord
from evaluation.answers.row import ERROR_TEXT, AnswerRow, Choice
from model.commands.command_line import UserError

# Another machine's clock may be ahead of ours by this many seconds.
CLOCKS_APART = 3600.0
# Of times that are sums of others.
ROUNDING = 1e-6
# What every figure needs.
COUNTERS = ("new_tokens", "wall_time")


class Effect(Enum):
    """The effect of a defect on its row; the value says it in words."""

    LISTED = "used all the same"
    UNSOUND = "left out of exact figures"
    BROKEN = "left out of exact figures; no honest run has it"
    UNUSABLE = "left out of all figures"


class Flaw(NamedTuple):
    """One thing that is wrong with a row."""

    what: str
    effect: Effect


@dataclass(frozen=True, slots=True)
class Defect:
    """A flaw and where it is; as a text, `FILE:LINE: question ID: WHAT (EFFECT)`.

    The line is None for a question that the file lacks.
    """

    path: str
    line: int | None
    question_id: int | str
    what: str
    effect: Effect

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{place}: question {self.question_id}: {self.what} ({self.effect.value})"


def check_limit(max_new_tokens: int | None) -> None:
    """Refuse a limit of new tokens below 1 with a `UserError`."""
    if max_new_tokens is not None and max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: got {max_new_tokens}; allowed: 1 or more")


def find_defects(
    path: str | Path, lines: Sequence[tuple[int, AnswerRow]], max_new_tokens: int | None = None
) -> list[Defect]:
    """Return every defect of an answer file, in file order; `lines` are its rows, as `read_lines` gives them.

    `max_new_tokens` is the limit of new tokens a turn; None takes the sidecar's, if there is one.
    """
    limit = max_new_tokens or RunRecord.read(path).max_new_tokens
    found = row_flaws([row for _, row in lines], limit)
    no_category = Flaw(
        "no 'category'; --question-file FILE gives that of its question", Effect.LISTED
    )
    return [
        Defect(str(path), number, row.question_id, *flaw)
        for (number, row), flaws in zip(lines, found, strict=True)
        for flaw in [*([] if row.has_category else [no_category]), *flaws]
    ]


def find_missing(files: Mapping[str, Sequence[tuple[int, AnswerRow]]]) -> list[Defect]:
    """Return a defect for each question that one file lacks and another has; rows are by their file's path."""
    ids = {path: dict.fromkeys(row.question_id for _, row in files[path]) for path in files}
    every = dict.fromkeys(question_id for found in ids.values() for question_id in found)
    return [
        Defect(path, None, question_id, "is missing, another file has it", Effect.UNSOUND)
        for path, found in ids.items()
        for question_id in every
        if question_id not in found
    ]


def row_flaws(
    rows: Sequence[AnswerRow], max_new_tokens: int | None = None, counts_texts: bool = False
) -> list[list[Flaw]]:
    """Return the flaws of each row, given all rows of the file in its order; a question may occur twice.

    `counts_texts` says that a tokenizer counts the tokens of texts, which their writer need not have done.
    """
    last_of = {row.question_id: place for place, row in enumerate(rows)}
    now = time.time()
    found = []
    previous: tuple[float, float] | None = None
    for place, row in enumerate(rows):
        flaws = []
        if last_of[row.question_id] != place:
            flaws.append(Flaw("is answered again further down", Effect.BROKEN))
        written = row.values.get("tstamp")
        if isinstance(written, int | float) and written > now + CLOCKS_APART:
            flaws.append(Flaw("was written in the future", Effect.BROKEN))
        if row.is_failed:
            flaws.append(Flaw(f"failed: {row.error or 'no answer'}", Effect.UNUSABLE))
        else:
            for choice in row.choices:
                flaws += _choice_flaws(choice, max_new_tokens, counts_texts)
                flaws += _stale_counters(choice, previous)
                previous = next(reversed(_turn_counters(choice)), previous)
        found.append(flaws)
    return found


def _choice_flaws(choice: Choice, limit: int | None, counts_texts: bool) -> Iterator[Flaw]:
    if missing := [key for key in COUNTERS if key not in choice.values]:
        names = " and no ".join(map(repr, missing))
        yield Flaw(f"no {names}; rates need both, texts can be compared", Effect.UNUSABLE)
        return
    has_text = any(text.strip() not in ("", ERROR_TEXT) for text in choice.turns)
    if has_text and not any(choice.new_tokens):
        yield Flaw(
            "texts, but no new token was counted; evaluation.speed --tokenizer-path counts the baseline's",
            Effect.UNSOUND if counts_texts else Effect.UNUSABLE,
        )
        return
    seconds = choice.seconds
    if not (math.isfinite(seconds) and seconds > 0):
        yield Flaw(f"took {seconds} s, a wall_time is above 0", Effect.UNUSABLE)
        return
    yield from _turn_flaws(choice, limit)
    yield from _sum_flaws(choice)


def _turn_flaws(choice: Choice, limit: int | None) -> Iterator[Flaw]:
    for turn, text in enumerate(choice.turns):
        # A model may write that word; then its tokens are there.
        if text == ERROR_TEXT and not choice.has_token_ids:
            yield Flaw(f"turn {turn} is {ERROR_TEXT!r}: it raised an error", Effect.UNSOUND)
    for turn, seconds in enumerate(choice.share_time or choice.wall_time):
        if seconds <= 0:
            yield Flaw(f"turn {turn} took {seconds} s", Effect.UNUSABLE)
    parts = zip(
        choice.share_time or choice.wall_time, choice.prefill_time, choice.decode_time, strict=False
    )
    for turn, (seconds, prefill, decoding) in enumerate(parts):
        if min(prefill, decoding) < 0 or prefill + decoding > seconds * (1 + ROUNDING):
            what = f"turn {turn} took {seconds} s, but its prompt {prefill} s and decoding {decoding} s"
            yield Flaw(what, Effect.BROKEN)
    counts = zip(choice.decoding_steps, choice.new_tokens, strict=False)
    for turn, (steps, tokens) in enumerate(counts):
        # Some writers count the prompt's own pass.
        if tokens > 0 and not 1 <= steps <= tokens + 1:
            yield Flaw(f"turn {turn} has {tokens} new tokens in {steps} steps", Effect.BROKEN)
    for turn, count in enumerate(choice.new_tokens):
        if count < 0:
            yield Flaw(f"turn {turn} has {count} new tokens", Effect.UNSOUND)
        elif count == 0:
            yield Flaw(f"turn {turn} has no new token", Effect.LISTED)
        elif limit is not None and count > limit:
            over = f"{count - limit} past the limit of {limit}"
            yield Flaw(
                f"turn {turn} has {count} new tokens, {over}; exact figures count {limit}",
                Effect.LISTED,
            )


def _sum_flaws(choice: Choice) -> Iterator[Flaw]:
    new_tokens, lengths, num_turns = choice.new_tokens, choice.accept_lengths, choice.num_turns
    num_entries = {
        "new_tokens": len(new_tokens),
        "wall_time": len(choice.wall_time),
        "share_time": len(choice.share_time),
        "decoding_steps": len(choice.decoding_steps),
        "idxs": len(choice.idxs),
        "token_ids": len(choice.token_ids),
    }
    for key, count in num_entries.items():
        if count not in (0, num_turns):
            yield Flaw(f"{count} {key} for {num_turns} turns", Effect.UNSOUND)
    if any(length < 1 for length in lengths):
        yield Flaw(f"a step of {min(lengths)} tokens", Effect.UNSOUND)
    counts = [len(turn) for turn in choice.token_ids]
    if counts and counts != new_tokens:
        yield Flaw(f"{counts} token ids, but new_tokens {new_tokens}", Effect.UNSOUND)
    if any(index < 0 for index in choice.idxs):
        yield Flaw(f"idxs {choice.idxs}, steps count from 0", Effect.UNSOUND)
    if math.isnan(choice.num_steps):
        steps_keys = "'accept_lengths', 'decoding_steps' or 'idxs'"
        yield Flaw(f"no {steps_keys}: mean accepted tokens are not known", Effect.LISTED)
    if "accept_lengths" not in choice.values:
        return
    steps = choice.decoding_steps
    sums = [("accept_lengths sum to", sum(lengths), "new_tokens", sum(new_tokens))]
    if steps:
        sums.append(("accept_lengths are", len(lengths), "decoding_steps", sum(steps)))
    for words, count, key, other in sums:
        if count != other:
            # One a turn: some writers count the prompt's own pass, or number steps from 0.
            effect = Effect.LISTED if abs(count - other) <= num_turns else Effect.UNSOUND
            yield Flaw(f"{words} {count}, {key} to {other}", effect)


def _stale_counters(choice: Choice, previous: tuple[float, float] | None) -> Iterator[Flaw]:
    """Turns with the very counters of the turn before: a writer went on after an error."""
    turns = _turn_counters(choice)
    before = [previous, *turns[:-1]]
    for turn, (mine, other) in enumerate(zip(turns, before, strict=False)):
        # Clocks have more digits; a time rounded to milliseconds may well come twice.
        if mine == other and mine[1] != round(mine[1], 3):
            what = f"turn {turn} repeats the counters of the turn before: {mine[0]} tokens in {mine[1]} s"
            yield Flaw(what, Effect.UNSOUND)


def _turn_counters(choice: Choice) -> list[tuple[float, float]]:
    if choice.share_time:
        return []  # turns of a batch may begin and end together
    return list(zip(choice.new_tokens, choice.wall_time, strict=False))
