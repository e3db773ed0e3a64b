"""Spec-Bench's figures from answer rows: mean accepted tokens, tokens/s and speed-up per task.

Why a module of its own: the speed and leaderboard commands show the same figures, and a test holds
them against an independent implementation. Pure functions; nothing here reads a file or prints.

The arithmetic is Spec-Bench's, so that figures compare with published ones:

- tokens/s of a question = sum(new_tokens) / sum(wall_time) of its first choice, prefill inside;
- tokens/s of a task = unweighted mean over its questions;
- speed-up = ratio of the two files' tokens/s;
- mean accepted tokens = mean over all steps of all questions.

One thing differs: a question that failed or is missing in either file is left out on both sides
and counted, where Spec-Bench compares whatever each file holds.

Use:
    figures = spec_bench_figures(read_answers("recycling.jsonl"), read_answers("vanilla.jsonl"))
    figures.loc["overall", "speedup"]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from evaluation.command_line import UserError
from evaluation.read_answers import Row, is_failed

MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
SPEC_BENCH_TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
CODE = "code"
OVERALL = "overall"
TASKS = (*SPEC_BENCH_TASKS, CODE, OVERALL)

CAUSES = ("failed", "base_failed", "missing", "base_missing")
COUNTS = ("questions", "left_out", *CAUSES)
FIGURES = ("mean_accepted_tokens", "tokens_per_second", "base_tokens_per_second", "speedup")

Tokenizer = Callable[[str], Any]


class RunFigures(NamedTuple):
    """Figures over several runs, one row a task.

    Attributes:
        mean: Mean of every figure; of the counts, the fewest ``questions`` and the most left out.
        deviation: Standard deviation (ddof=1) of every figure, NaN for a single run.
        num_runs: Number of runs.
    """

    mean: pd.DataFrame
    deviation: pd.DataFrame
    num_runs: int

    def figure(self, task: str, name: str) -> float:
        """Return one mean, NaN if the task does not occur."""
        return _value(self.mean, task, name)

    def spread(self, task: str, name: str) -> float:
        """Return one deviation, NaN if the task does not occur or there is a single run."""
        return _value(self.deviation, task, name)


def task_of(category: str) -> str:
    """Return the task a category is reported under; MT-bench's eight categories are one task."""
    return "mt_bench" if category in MT_BENCH_CATEGORIES else category


def in_task_order(tasks: Iterable[str]) -> list[str]:
    """Sort tasks as Spec-Bench reports them: its six, code, other people's by name, overall."""
    places = {task: place for place, task in enumerate((*SPEC_BENCH_TASKS, CODE))}
    places[OVERALL] = len(places) + 1
    return sorted(set(tasks), key=lambda task: (places.get(task, len(places) - 1), task))


def spec_bench_figures(
    rows: Sequence[Row],
    base_rows: Sequence[Row],
    tokenizer: Tokenizer | None = None,
    names: tuple[str, str] = ("the answers", "the baseline"),
) -> pd.DataFrame:
    """Return Spec-Bench's figures of a method against a baseline, one row for each task that occurs.

    ``overall`` is over everything but code, as MBPP is a benchmark beside Spec-Bench; if there is
    only code, it is over code.

    Args:
        rows: Answers of the method.
        base_rows: Answers of the baseline.
        tokenizer: Counts the baseline's tokens as Spec-Bench does: its text re-tokenised, minus one
            per turn. None takes the baseline's own counters, the ruler the method is measured with.
        names: What errors call the two sides, such as their file names.

    Returns:
        Index: task, in Spec-Bench's order. ``COUNTS`` columns: ``questions`` used, ``left_out``, and
        of these how many failed or are missing on either side. ``FIGURES`` columns: tokens, tokens/s
        twice, and a ratio; NaN for a task none of whose questions is answered on both sides.

    Raises:
        UserError: A row has no counters or no time, the files answer different questions, or no
            question is answered in both.
    """
    pairs = _pair_questions(rows, base_rows, tokenizer, names)
    if not pairs["is_used"].any():
        raise UserError(f"no question is answered in both {names[0]} and {names[1]}")
    not_code = pairs[pairs["task"] != CODE]
    tasks = {task: pairs[pairs["task"] == task] for task in in_task_order(pairs["task"])}
    tasks[OVERALL] = pairs if not_code.empty else not_code
    figures = {task: _task_figures(part) for task, part in tasks.items()}
    table = pd.DataFrame.from_dict(figures, orient="index", columns=[*COUNTS, *FIGURES])
    return table.astype(dict.fromkeys(COUNTS, int) | dict.fromkeys(FIGURES, float))


def over_runs(runs: Sequence[pd.DataFrame]) -> RunFigures:
    """Return mean and deviation over runs of what ``spec_bench_figures`` gave for each.

    Args:
        runs: One table a run, at least one.
    """
    tables = pd.concat(runs).groupby(level=0)
    order = in_task_order(task for run in runs for task in run.index)
    mean = tables[list(FIGURES)].mean()
    mean.insert(0, "questions", tables["questions"].min())
    for place, name in enumerate(COUNTS[1:], start=1):
        mean.insert(place, name, tables[name].max())
    deviation = tables[list(FIGURES)].std(ddof=1)
    return RunFigures(mean.loc[order], deviation.loc[order], len(runs))


def left_out_text(figures: pd.DataFrame, names: tuple[str, str]) -> str | None:
    """Say how many questions the figures leave out and why; None if they use every one.

    Args:
        figures: What ``spec_bench_figures`` returned.
        names: What to call the method's and the baseline's answers.
    """
    counts = figures.drop(index=OVERALL)[list(COUNTS)].sum()
    if not counts["left_out"]:
        return None
    wordings = ("failed in {0}", "failed in {1}", "missing in {0}", "missing in {1}")
    causes = [
        f"{counts[cause]} {wording.format(*names)}"
        for cause, wording in zip(CAUSES, wordings, strict=True)
        if counts[cause]
    ]
    total = counts["questions"] + counts["left_out"]
    return f"{counts['left_out']} of {total} questions are left out: {', '.join(causes)}"


def _value(table: pd.DataFrame, task: str, name: str) -> float:
    value: Any = table.at[task, name] if task in table.index else math.nan
    return float(value)


def _pair_questions(
    rows: Sequence[Row],
    base_rows: Sequence[Row],
    tokenizer: Tokenizer | None,
    names: tuple[str, str],
) -> pd.DataFrame:
    """One line for each question of either file; figures are NaN where it is not used."""
    by_id = {row["question_id"]: row for row in rows}
    base_by_id = {row["question_id"]: row for row in base_rows}
    lines = []
    for question_id in dict.fromkeys((*by_id, *base_by_id)):
        row, base_row = by_id.get(question_id), base_by_id.get(question_id)
        _check_same_category(row, base_row, names)
        line: dict[str, Any] = {
            "task": task_of((row or base_row or {})["category"]),
            "failed": row is not None and is_failed(row),
            "base_failed": base_row is not None and is_failed(base_row),
            "missing": row is None,
            "base_missing": base_row is None,
        }
        line["is_used"] = not any(line[cause] for cause in CAUSES)
        if row is not None and base_row is not None and line["is_used"]:
            steps = _counters(row, "accept_lengths", names[0])
            line |= {"num_steps": len(steps), "num_accepted": sum(steps)}
            line["tokens_per_second"] = _tokens_per_second(row, names[0], None)
            line["base_tokens_per_second"] = _tokens_per_second(base_row, names[1], tokenizer)
        lines.append(line)
    figures = ["num_steps", "num_accepted", *FIGURES[1:3]]
    return pd.DataFrame(lines, columns=["task", *CAUSES, "is_used", *figures])


def _task_figures(part: pd.DataFrame) -> dict[str, float]:
    used = part[part["is_used"]]
    num_steps = used["num_steps"].sum()
    speed = used["tokens_per_second"].mean()
    base_speed = used["base_tokens_per_second"].mean()
    return {
        "questions": len(used),
        "left_out": len(part) - len(used),
        **{cause: part[cause].sum() for cause in CAUSES},
        "mean_accepted_tokens": used["num_accepted"].sum() / num_steps if num_steps else math.nan,
        "tokens_per_second": speed,
        "base_tokens_per_second": base_speed,
        "speedup": speed / base_speed if base_speed > 0 else math.nan,
    }


def _tokens_per_second(row: Row, name: str, tokenizer: Tokenizer | None) -> float:
    seconds = sum(_counters(row, "wall_time", name))
    if not (math.isfinite(seconds) and seconds > 0):
        raise UserError(
            f"{name}: question {row['question_id']!r} took {seconds} s, tokens/s needs a wall_time "
            "above 0; answer the question again, or delete its row"
        )
    if tokenizer is None:
        return sum(_counters(row, "new_tokens", name)) / seconds
    turns = _counters(row, "turns", name)
    return sum(len(tokenizer(turn).input_ids) - 1 for turn in turns) / seconds


def _counters(row: Row, key: str, name: str) -> list[Any]:
    """A list of the first choice, the only one Spec-Bench measures."""
    if key not in row["choices"][0]:
        raise UserError(
            f"{name}: question {row['question_id']!r} has no {key!r}; "
            "speed needs answers written by an inference command"
        )
    return row["choices"][0][key]


def _check_same_category(row: Row | None, base_row: Row | None, names: tuple[str, str]) -> None:
    if row is None or base_row is None or row["category"] == base_row["category"]:
        return
    raise UserError(
        f"question {row['question_id']!r} is {row['category']!r} in {names[0]} but "
        f"{base_row['category']!r} in {names[1]}; give answers to the same questions"
    )
