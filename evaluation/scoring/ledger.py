"""The identities of honest runs: what must be true of answer files, whatever the method and the machine.

They are checked here, once, for every command that prints figures. A broken one is named, and no verdict stands
beside it; those that an interrupted run or failed rows may break have a word of their own. Those of a row alone are
among its defects (`evaluation/answers/defects.py`, `Effect.BROKEN`); those of a file with its sidecar, of files
beside each other, and of figures are here. Times and tokens that were made up so that they agree with each other
break none: only a rerun shows them (`evaluation.equal`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from evaluation.answers.defects import CLOCKS_APART
from evaluation.answers.row import AnswerRow
from evaluation.scoring.figures import EXACT_SPEEDUPS, INTERVALS, RunFigures, by_task, quotient
from evaluation.scoring.groups import PLAIN, AnswerFile, Broken, TooFast
from evaluation.scoring.intervals import UNKNOWN, equal_prompts, largest_speedup
from evaluation.scoring.per_question import OVERALL

# Seconds by which clocks that are read one after the other may differ.
CLOCK_ERROR = 2.0
# A prompt that is read takes at least this share of its time in the baseline, from so many seconds on.
LEAST_PREFILL, LEAST_PREFILL_SECONDS = 0.5, 0.05
# From so many questions on a file with another's times is its copy.
LEAST_COPIED = 3
# Texts of one model have about as many tokens a character, whoever counts them; in short ones end tokens tell.
MOST_DENSITY, LEAST_TOKENS_A_TURN = 1.5, 8
# Of a server's later run over the first one's time: below it, answers are remembered, not computed.
LEAST_AGAIN = 0.25
# How far a point may lie outside its interval.
ROUNDING = 1e-6


def broken_identities(
    pairs: Sequence[tuple[AnswerFile, AnswerFile]], figures: RunFigures
) -> list[Broken]:
    """Return each identity that a method's runs break, each beside its baseline's of the same run.

    A method may be its own baseline.
    """
    found = [
        Broken(f"{file.path.name}: {what}")
        for pair in pairs
        for file in pair
        for what in _in_file(file)
    ]
    for file, base in pairs:
        if file.path != base.path:
            names = f"{file.path.name} beside {base.path.name}"
            found += [one._replace(line=f"{names}: {one.line}") for one in _between(file, base)]
    found += [Broken(line) for line in _remembered(pairs)]
    name = pairs[0][0].path.name
    found += [one._replace(line=f"{name}: {one.line}") for one in _in_figures(figures)]
    return list(dict.fromkeys(found))


def _in_file(file: AnswerFile) -> Iterator[str]:
    """Yield what a file breaks by itself."""
    rows, record = file.rows, file.record
    broken = file.frame["broken"]
    if count := int((broken != "").sum()):
        place = (broken != "").argmax()
        first = f"question {rows[place].question_id}: {broken.iloc[place]}"
        yield f"{count} of {len(rows)} rows cannot be, as {first}"
    sealed = record.values.get("num_rows")
    if isinstance(sealed, int) and sealed != len(rows):
        yield f"has {len(rows)} rows, its run had {sealed}"
    start, end = (record.values.get(key) for key in ("start_time", "end_time"))
    if not isinstance(start, int | float) or not isinstance(end, int | float):
        return
    if not start <= end <= time.time() + CLOCKS_APART:
        yield f"its run ended {end - start:.0f} s after it began, or in the future"
        return
    written = [at for row in rows if isinstance(at := row.values.get("tstamp"), int | float) and at]
    outside = sum(not start - CLOCK_ERROR <= at <= end + CLOCK_ERROR for at in written)
    if outside:
        yield f"{outside} of {len(rows)} rows were written before its run began or after it ended"
    if record.values.get("replayed"):
        return  # its times are those of another machine
    choices = [choice for row in rows for choice in row.choices]
    seconds = sum(choice.seconds for choice in choices)
    # How many answers may have been under way at a time whose seconds all count.
    are_shared = all(choice.share_time for choice in choices)
    parts = [record.values.get("num_workers"), len(record.values.get("merged_from") or ())]
    parts.append(1 if are_shared else record.values.get("batch_size"))
    at_a_time = math.prod(part for part in parts if isinstance(part, int) and part > 1)
    if seconds > (end - start) * at_a_time + CLOCK_ERROR:
        yield f"answering took {seconds:.6g} s in all, its run {end - start:.6g} s"


def _between(file: AnswerFile, base: AnswerFile) -> Iterator[Broken]:
    """Yield what a file breaks beside its baseline's."""
    mine, theirs = ({repr(row.question_id): row for row in one.rows} for one in (file, base))
    if lacking := len(mine.keys() ^ theirs.keys()):
        what = (
            "questions have a row in one of them alone: a run was interrupted, or rows were removed"
        )
        yield Broken(f"{lacking} {what}; run the same command again", may_be_honest=True)
    common = [(mine[key], theirs[key]) for key in mine.keys() & theirs.keys()]
    unequal = [one.question_id for one, other in common if _has_other_counts(one, other)]
    if unequal:
        what = f"{len(unequal)} equal texts have other numbers of tokens"
        yield Broken(f"{what}, as of question {unequal[0]}")
    mine_a_character, theirs_a_character = (
        _tokens_a_character([pair[side] for pair in common]) for side in (0, 1)
    )
    ratio = quotient(mine_a_character, theirs_a_character)
    if ratio > MOST_DENSITY or ratio < 1 / MOST_DENSITY:
        what = f"has {ratio:.2f} times as many tokens a character"
        yield Broken(f"{what}: they were not counted in its texts")
    times = [[choice.wall_time for choice in row.choices] for pair in common for row in pair]
    if len(common) >= LEAST_COPIED and times[::2] == times[1::2]:
        yield Broken("all times are equal to the last digit: one is a copy of the other")
    # More tokens than steps; some writers count the first token of a turn in no step.
    drafted = sum(
        any(choice.num_accepted > choice.num_steps + choice.num_turns for choice in row.choices)
        for row in base.rows
    )
    if drafted and base.is_of(PLAIN):
        what = f"{drafted} rows of the baseline have steps of more than one token"
        yield Broken(f"{what}: it is not plain decoding")
    num_prompts, seconds, base_seconds = equal_prompts(file.rows, base.rows)
    is_unread = base_seconds > LEAST_PREFILL_SECONDS and seconds < LEAST_PREFILL * base_seconds
    if is_unread and not (file.record.is_served or base.record.is_served):
        took = f"{seconds:.3g} s, in the baseline {base_seconds:.3g} s"
        yield Broken(f"{num_prompts} equal prompts took {took}: they were not read")


def _tokens_a_character(rows: Sequence[AnswerRow]) -> float:
    """Return tokens over characters, NaN where texts are short, or are not all that was generated."""
    choices = [choice for row in rows for choice in row.choices if not any(choice.tool_calls)]
    tokens = sum(sum(choice.new_tokens) for choice in choices)
    if tokens < LEAST_TOKENS_A_TURN * sum(choice.num_turns for choice in choices):
        return math.nan
    texts = (text for choice in choices for text in (*choice.turns, *choice.reasoning))
    return quotient(tokens, sum(map(len, texts)))


def _remembered(pairs: Sequence[tuple[AnswerFile, AnswerFile]]) -> Iterator[str]:
    """Yield the later runs of a server that take hardly any of the first one's time."""
    first, base = pairs[0]
    for file, other in pairs[1:] if first.record.is_served else ():
        again, base_again = _over_first(file, first), _over_first(other, base)
        if again < LEAST_AGAIN * min(base_again, 1):
            yield (
                f"{file.path.name} took {again:.2f} of the seconds of {first.path.name}: the server remembers "
                "answers; start it without a cache of them, or anew for each run"
            )


def _over_first(file: AnswerFile, first: AnswerFile) -> float:
    """Return a run's seconds over an earlier one's, of the questions of both; prompts may come from a cache."""
    seconds, earlier = (
        frame.set_index(frame["question_id"].map(repr))["decode_seconds"].dropna()
        for frame in (file.frame, first.frame)
    )
    common = seconds.index.intersection(earlier.index)
    return quotient(seconds[common].sum(), earlier[common].sum())


def _has_other_counts(one: AnswerRow, other: AnswerRow) -> bool:
    pairs = zip(one.choices, other.choices, strict=False)
    return any(
        mine.turns == theirs.turns
        and any(mine.turns)
        and mine.new_tokens != theirs.new_tokens
        and mine.token_ids == theirs.token_ids
        for mine, theirs in pairs
    )


def _in_figures(figures: RunFigures) -> Iterator[Broken]:
    """Yield points that lie outside their own intervals; failed rows of one side may move them there."""
    for task in figures.mean.index:
        for name in INTERVALS:
            point, interval = figures.figure(task, name), figures.interval(task, name)
            if not interval.is_known or math.isnan(point):
                continue
            if not interval.low * (1 - ROUNDING) <= point <= interval.high * (1 + ROUNDING):
                num_left_out = int(figures.figure(task, "left_out"))
                why = f", without {num_left_out} questions left out" if num_left_out else ""
                what = f"{name} of {task} is {point:.2f}, outside its own interval{why}"
                yield Broken(what, num_left_out > 0)


def too_fast(
    pairs: Sequence[tuple[AnswerFile, AnswerFile]],
    figures: RunFigures,
    noise: RunFigures | None = None,
) -> list[TooFast]:
    """Return the tasks in which a method is faster than its acceptance allows (`largest_speedup`), or overall.

    Over plain decoding by the same program: steps of another one may be the faster ones. `noise` are the figures of
    a second run of the baseline over the first. Of a task with few questions, chance alone may make it faster.
    """
    file, base = pairs[0]
    is_served = file.record.is_served or base.record.is_served
    if file.path == base.path or is_served or not (base.is_of(PLAIN) or base.record.is_foreign):
        return []
    found = []
    base_parts = by_task(base.frame)
    for task in figures.mean.index:
        part = base_parts.get(task, base.frame)
        base_mat = quotient(part["accepted"].sum(skipna=False), part["steps"].sum(skipna=False))
        mat = figures.figure(task, "exact_mean_accepted_tokens")
        for name in EXACT_SPEEDUPS:
            speedup, interval = figures.figure(task, name), figures.interval(task, name)
            floor = noise.interval(OVERALL, name) if noise else UNKNOWN
            least = interval.low if interval.is_known and task != OVERALL else speedup
            if least > largest_speedup(mat / base_mat, floor, is_sure=interval.is_known):
                found.append(TooFast(task, speedup, mat))
                break
    return [one for one in found if one.task == OVERALL] or found
