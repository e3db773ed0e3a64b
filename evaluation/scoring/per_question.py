"""Answer rows as a tidy table: one line a row, with the sums that every figure is made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pandas as pd

from evaluation.answers.defects import Effect, row_flaws
from evaluation.answers.row import AnswerRow, Choice
from evaluation.questions.questions import UNCATEGORISED
from model.commands.command_line import UserError

MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
# SPEED-Bench's eleven, of which seven are also MT-bench's; only it has this one.
SPEED_BENCH_CATEGORIES = frozenset(
    (
        *("coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay"),
        *("stem", "summarization", "writing"),
    )
)
SPEED_BENCH_MARK = "multilingual"
# The task of the figures over all questions.
OVERALL = "overall"
COLUMNS = (
    *("question_id", "category", "task", "broken"),
    *("is_failed", "is_usable", "is_sound", "is_flawless"),
    *("first_tokens", "first_steps", "first_accepted", "first_seconds"),
    *("tokens", "steps", "accepted", "seconds", "decode_seconds", "cpu_seconds"),
    "draft_tokens",
)

Tokenizer = Callable[[str], Any]


def task_of(category: str, others: Collection[str] = MT_BENCH_CATEGORIES) -> str:
    """Return the task a category is reported under; MT-bench's eight categories are one task.

    `others` are those of the same file: "math" without any other of MT-bench's is a set of its own, such as
    GSM8K in files of EAGLE, and beside "multilingual" each of SPEED-Bench's eleven is one.
    """
    if category == OVERALL:
        return f"{category} (category)"
    if SPEED_BENCH_MARK in others and category in SPEED_BENCH_CATEGORIES:
        return category
    if category == "math" and MT_BENCH_CATEGORIES.isdisjoint(set(others) - {category}):
        return category
    return "mt_bench" if category in MT_BENCH_CATEGORIES else category


def question_frame(
    rows: Sequence[AnswerRow], max_new_tokens: int | None = None, tokenizer: Tokenizer | None = None
) -> pd.DataFrame:
    """Return a line for each answer row, in file order.

    Args:
        rows: rows of one file; a question may occur twice.
        max_new_tokens: limit of new tokens a turn, past which none counts; None if not known.
        tokenizer: counts `first_tokens` from the text, minus one a turn, as Spec-Bench does with
            a baseline. None takes the row's own counter.

    Returns:
        `COLUMNS`: the question; the identity of honest runs that it breaks, "" for none; whether it failed,
        has figures at all (`is_usable`), has no defect that forbids exact ones (`is_sound`), has none
        (`is_flawless`). Of the first choice, the only one that Spec-Bench measures: new tokens, steps, tokens
        accepted (bonus tokens included) and seconds, over its turns. Of all choices the same, tokens only up to
        the limit; seconds without the prompt, CPU seconds, and drafted nodes. Steps, accepted tokens and these
        are NaN where the writer did not count them.
        NaN where not usable.
    """
    flaws = row_flaws(rows, max_new_tokens, counts_texts=tokenizer is not None)
    categories = {row.category for row in rows}
    lines = []
    for row, found in zip(rows, flaws, strict=True):
        effects = {flaw.effect for flaw in found}
        line: dict[str, Any] = {
            "question_id": row.question_id,
            "category": row.category,
            "task": task_of(row.category, categories),
            "broken": next((flaw.what for flaw in found if flaw.effect is Effect.BROKEN), ""),
            "is_failed": row.is_failed,
            "is_usable": Effect.UNUSABLE not in effects,
            "is_sound": effects <= {Effect.LISTED},
            "is_flawless": not effects,
        }
        if line["is_usable"]:
            line |= _sums(row.choices, max_new_tokens, tokenizer)
        lines.append(line)
    frame = pd.DataFrame(lines, columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(COLUMNS[8:], float))


def pair_questions(
    frame: pd.DataFrame, base_frame: pd.DataFrame, names: tuple[str, str]
) -> pd.DataFrame:
    """Return a line for each question of either file, from the last row that each has for it.

    The frames are the `question_frame` of the method's rows and of the baseline's, `names` those of the
    two sides in errors, such as their file names.

    Returns:
        The columns of both, the baseline's with `base_` in front; `task`; on each side whether
        the question is `missing`, `failed` or `unsound` (the first that applies);
        `is_used` where none of these is the case; `rate` and `base_rate`, tokens/s of the
        first choice.

    Raises:
        UserError: if the files answer different questions, or none has figures in both.
    """
    sides = [side.drop_duplicates("question_id", keep="last") for side in (frame, base_frame)]
    # Numbers and texts are different ids, and must not become one.
    keyed = [side.set_index(side["question_id"].map(repr)) for side in sides]
    order = dict.fromkeys((*keyed[0].index, *keyed[1].index))
    pairs = keyed[0].join(keyed[1].add_prefix("base_"), how="outer").loc[list(order)]
    both = pairs.dropna(subset=["category", "base_category"])
    for question_id, pair in both[both["category"] != both["base_category"]].iterrows():
        raise UserError(
            f"question {question_id} is {pair['category']!r} in {names[0]} but "
            f"{pair['base_category']!r} in {names[1]}; give answers to the same questions, or with "
            "--question-file the categories of answers that have none"
        )
    pairs["task"] = pairs["task"].fillna(pairs["base_task"])
    is_free = pd.Series(True, index=pairs.index)
    for prefix in ("", "base_"):
        is_missing = pairs[f"{prefix}question_id"].isna()
        is_failed = pairs[f"{prefix}is_failed"].eq(True)
        is_unsound = ~is_missing & ~is_failed & pairs[f"{prefix}is_sound"].ne(True)
        pairs[f"{prefix}missing"], pairs[f"{prefix}failed"] = is_missing, is_failed
        pairs[f"{prefix}unsound"] = is_unsound
        is_free &= ~(is_missing | is_failed | is_unsound)
        pairs[f"{prefix}rate"] = pairs[f"{prefix}first_tokens"] / pairs[f"{prefix}first_seconds"]
    pairs["is_used"] = is_free
    usable = pairs["is_usable"].eq(True) & pairs["base_is_usable"].eq(True)
    if not usable.any():
        raise UserError(
            f"no question has figures in both {names[0]} and {names[1]}; "
            "python -m evaluation.defects FILE... lists what is wrong"
        )
    return pairs


def uncategorised_text(frame: pd.DataFrame, name: str) -> str | None:
    """Say how many rows have no category, and so are one task; None if there is none."""
    count = int((frame["category"] == UNCATEGORISED).sum())
    if not count:
        return None
    return (
        f"{count} of {len(frame)} rows in {name} have no category and count as one task; --question-file FILE "
        "gives them the categories of their questions"
    )


def used_defects_text(frame: pd.DataFrame, name: str) -> str | None:
    """Say how many rows with a defect legacy figures include; None if there is none."""
    count = int((frame["is_usable"] & ~frame["is_flawless"]).sum())
    if not count:
        return None
    return (
        f"{count} of {len(frame)} rows in {name} have a defect, and legacy figures include them; "
        "python -m evaluation.defects lists them"
    )


def _sums(
    choices: Sequence[Choice], limit: int | None, tokenizer: Tokenizer | None
) -> dict[str, float]:
    first = choices[0]
    counted = first.new_tokens
    if tokenizer is not None:
        counted = [len(tokenizer(turn).input_ids) - 1 for turn in first.turns]
    counts = [count for choice in choices for count in choice.new_tokens]
    return {
        "first_tokens": sum(counted),
        "first_steps": first.num_steps,
        "first_accepted": first.num_accepted,
        "first_seconds": first.seconds,
        "tokens": sum(counts if limit is None else (min(count, limit) for count in counts)),
        "steps": sum(choice.num_steps for choice in choices),
        "accepted": sum(choice.num_accepted for choice in choices),
        "seconds": sum(choice.seconds for choice in choices),
        "decode_seconds": sum(sum(choice.decode_time) for choice in choices),
        "cpu_seconds": sum(sum(choice.cpu_time) for choice in choices),
        "draft_tokens": sum(sum(choice.draft_tokens) for choice in choices),
    }
