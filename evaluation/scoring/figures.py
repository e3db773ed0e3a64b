"""A method's figures against a baseline, per task: Spec-Bench's own, exact ones, and their intervals.

Pure functions, which the speed and leaderboard commands share and a test compares with an independent
implementation.

Two rulers, side by side (docs/numbers.md says when they differ):

- legacy, Spec-Bench's arithmetic to the digit: tokens/s of a question = new_tokens / wall_time of
  its first choice, prompt inside; of a task = unweighted mean over the rows that the file holds;
  speed-up = ratio of the two files' tokens/s; mean accepted tokens = mean over all steps;
- exact: sums before quotients, so that every token weighs the same; all choices; only questions
  with sound rows on both sides, the others counted with their cause; end to end, and decoding alone.

Use:
    figures = measure_runs([(question_frame(rows), question_frame(base_rows))])
    figures.figure("overall", "exact_speedup"), figures.interval("overall", "exact_speedup")
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from evaluation.scoring.intervals import CONFIDENCE, UNKNOWN, Interval, RatioOfSums, paired_interval
from evaluation.scoring.per_question import OVERALL, pair_questions

SPEC_BENCH_TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
CODE = "code"

CAUSES = ("failed", "base_failed", "missing", "base_missing", "unsound", "base_unsound")
COUNTS = ("questions", "left_out", *CAUSES)
LEGACY_COUNTS = ("rows", "base_rows")
FIGURES = ("mean_accepted_tokens", "tokens_per_second", "base_tokens_per_second", "speedup")
EXACT_FIGURES = (
    *(f"exact_{name}" for name in FIGURES),
    *("decode_tokens_per_second", "base_decode_tokens_per_second", "decode_speedup"),
    "break_even_mat",
    *("cpu_ms_per_token", "base_cpu_ms_per_token", "cpu_ratio"),
)
WORK = ("tokens", "steps", "accepted", "seconds", "decode_seconds", "cpu_seconds")
EXACT_SPEEDUPS = ("exact_speedup", "decode_speedup")
INTERVALS = ("speedup", *EXACT_SPEEDUPS)
# Of `RunFigures`, those with one row a task.
TABLES = ("mean", "deviation", "intervals")


class RunFigures(NamedTuple):
    """Figures over several runs, one row a task."""

    # Mean of every figure; of the counts, the fewest rows and questions and the most left out.
    mean: pd.DataFrame
    deviation: pd.DataFrame  # standard deviation (ddof=1) of every figure, NaN for a single run
    num_runs: int
    intervals: pd.DataFrame  # columns `INTERVALS`: an `Interval` over questions of each speed-up
    of_runs: tuple[pd.DataFrame, ...]  # the same figures of each run

    def figure(self, task: str, name: str) -> float:
        """Return one mean, NaN if the task does not occur."""
        return _value(self.mean, task, name)

    def spread(self, task: str, name: str) -> float:
        """Return one deviation, NaN if the task does not occur or there is a single run."""
        return _value(self.deviation, task, name)

    def interval(self, task: str, name: str) -> Interval:
        """Return the interval of a speed-up, unknown if the task has too few questions (`LEAST_QUESTIONS`)."""
        if task not in self.intervals.index:
            return UNKNOWN
        found: Any = self.intervals.at[task, name]
        return found

    def only(self, task: str) -> RunFigures:
        return self._replace(**{name: getattr(self, name).loc[[task]] for name in TABLES})

    @staticmethod
    def joined(parts: Sequence[RunFigures]) -> RunFigures:
        """Return the figures of several benchmarks as one; a task in two of them has the first one's."""
        joined = {name: pd.concat([getattr(part, name) for part in parts]) for name in TABLES}
        tables = {name: table[~table.index.duplicated()] for name, table in joined.items()}
        num_runs = max(part.num_runs for part in parts)
        of_runs = tuple(run for part in parts for run in part.of_runs)
        return parts[0]._replace(num_runs=num_runs, of_runs=of_runs, **tables)


def counts_code(tasks: Iterable[str]) -> bool:
    """Whether overall figures of a file with these tasks count code.

    Beside all six tasks of Spec-Bench they do not: there, code is another benchmark's column, MBPP's.
    """
    return not set(SPEC_BENCH_TASKS) <= set(tasks)


def in_task_order(tasks: Iterable[str]) -> list[str]:
    """Sort tasks as Spec-Bench reports them: its six, code, other people's by name, overall."""
    places = {task: place for place, task in enumerate((*SPEC_BENCH_TASKS, CODE))}
    places[OVERALL] = len(places) + 1
    return sorted(set(tasks), key=lambda task: (places.get(task, len(places) - 1), task))


def measure_runs(
    runs: Sequence[tuple[pd.DataFrame, pd.DataFrame]],
    names: tuple[str, str] = ("the answers", "the baseline"),
    confidence: float = CONFIDENCE,
) -> RunFigures:
    """Return the figures of a method over its runs, with intervals over questions.

    Args:
        runs: for each run, at least one, the `question_frame` of the method's rows and of the
            baseline's.
        names: the names of the two sides in errors, such as their file names.
        confidence: of the intervals.

    Raises:
        UserError: if the files answer different questions, or none has figures in both.
    """
    paired = [pair_questions(frame, base, names) for frame, base in runs]
    figures = [_run_figures(*run, pairs) for run, pairs in zip(runs, paired, strict=True)]
    tables = pd.concat(figures).groupby(level=0)
    order = in_task_order(task for run in figures for task in run.index)
    fewest = tables[["questions", *LEGACY_COUNTS]].min()
    most = tables[list(COUNTS[1:])].max()
    values = tables[[*FIGURES, *EXACT_FIGURES]]
    mean = pd.concat((fewest, most, values.mean()), axis=1)[list(figures[0].columns)]
    intervals = pd.DataFrame(
        {task: _intervals(part, confidence) for task, part in by_task(pd.concat(paired)).items()},
        index=list(INTERVALS),
    ).T
    deviation = values.std(ddof=1).loc[order]
    return RunFigures(mean.loc[order], deviation, len(runs), intervals, tuple(figures))


def _run_figures(
    frame: pd.DataFrame, base_frame: pd.DataFrame, pairs: pd.DataFrame
) -> pd.DataFrame:
    """Return the figures of one run, one row for each task that occurs; `overall` is as `counts_code` says.

    Returns:
        Index: task, in Spec-Bench's order. `COUNTS`: questions with sound rows on both sides,
        others left out of exact figures, and their causes (the first that applies). `FIGURES`:
        legacy tokens, tokens/s twice, and a ratio, over `LEGACY_COUNTS` rows. `EXACT_FIGURES`:
        the same, exactly; tokens/s and speed-up of decoding alone, NaN where a writer did not time
        it; the mean accepted tokens at which that speed-up would be 1; CPU milliseconds of the
        process for a token, and their ratio to the baseline's.
    """
    exact = {task: _exact_figures(part) for task, part in by_task(pairs).items()}
    with_code = counts_code(pairs["task"])
    tasks, base_tasks = (by_task(side, with_code) for side in (frame, base_frame))
    # A task may occur in one file alone.
    legacy = {
        task: _legacy_figures(tasks.get(task, frame[:0]), base_tasks.get(task, base_frame[:0]))
        for task in exact
    }
    table = pd.DataFrame.from_dict({task: exact[task] | legacy[task] for task in exact}, "index")
    counts = [*COUNTS, *LEGACY_COUNTS]
    columns = [*counts, *FIGURES, *EXACT_FIGURES]
    return table[columns].astype(dict.fromkeys(counts, int) | dict.fromkeys(columns[8:], float))


def left_out_text(figures: pd.DataFrame, names: tuple[str, str]) -> str | None:
    """Say how many questions of a run exact figures leave out and why; None if they use every one.

    `names` are those of the method's and the baseline's answers.
    """
    counts = figures.drop(index=OVERALL)[list(COUNTS)].sum()
    if not counts["left_out"]:
        return None
    wordings = (
        *("failed in {0}", "failed in {1}", "missing in {0}", "missing in {1}"),
        *("with a defect in {0}", "with a defect in {1}"),
    )
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


def by_task(frame: pd.DataFrame, with_code: bool | None = None) -> dict[str, pd.DataFrame]:
    """Return the parts of a frame by task, in Spec-Bench's order, and the overall part.

    None for `with_code` lets the frame's own tasks say whether the overall part has code.
    """
    parts = {str(task): part for task, part in frame.groupby("task", sort=False)}
    tasks = {task: parts[task] for task in in_task_order(parts)}
    if with_code is None:
        with_code = counts_code(tasks)
    return tasks | {OVERALL: frame if with_code else frame[frame["task"] != CODE]}


def _legacy_figures(part: pd.DataFrame, base_part: pd.DataFrame) -> dict[str, float]:
    used, base_used = part[part["is_usable"]], base_part[base_part["is_usable"]]
    speed = (used["first_tokens"] / used["first_seconds"]).mean()
    base_speed = (base_used["first_tokens"] / base_used["first_seconds"]).mean()
    return {
        "rows": len(used),
        "base_rows": len(base_used),
        "mean_accepted_tokens": quotient(
            used["first_accepted"].sum(skipna=False), used["first_steps"].sum(skipna=False)
        ),
        "tokens_per_second": speed,
        "base_tokens_per_second": base_speed,
        "speedup": quotient(speed, base_speed),
    }


def _exact_figures(part: pd.DataFrame) -> dict[str, float]:
    """Return counts of questions, and token-weighted figures over those with sound rows on both sides."""
    used = part[part["is_used"]]
    figures: dict[str, float] = {"questions": len(used), "left_out": len(part) - len(used)}
    is_counted = part["is_used"].to_numpy(bool)
    for cause in CAUSES:
        # A question counts under its first cause, so that causes sum to what is left out.
        is_cause = part[cause].to_numpy(bool)
        figures[cause] = int((is_cause & ~is_counted).sum())
        is_counted = is_counted | is_cause
    # A sum with an unknown part is unknown.
    total = used[[prefix + name for name in WORK for prefix in ("", "base_")]].sum(skipna=False)

    def per(over: str, under: str) -> float:
        return quotient(total[over], total[under])

    mat = per("accepted", "steps")
    speed, base_speed = per("tokens", "seconds"), per("base_tokens", "base_seconds")
    decode_speed = per("tokens", "decode_seconds")
    base_decode_speed = per("base_tokens", "base_decode_seconds")
    decode_speedup = quotient(decode_speed, base_decode_speed)
    cpu, base_cpu = per("cpu_seconds", "tokens"), per("base_cpu_seconds", "base_tokens")
    return figures | {
        "exact_mean_accepted_tokens": mat,
        "exact_tokens_per_second": speed,
        "exact_base_tokens_per_second": base_speed,
        "exact_speedup": quotient(speed, base_speed),
        "decode_tokens_per_second": decode_speed,
        "base_decode_tokens_per_second": base_decode_speed,
        "decode_speedup": decode_speedup,
        "break_even_mat": quotient(mat, decode_speedup),
        "cpu_ms_per_token": 1000 * cpu,
        "base_cpu_ms_per_token": 1000 * base_cpu,
        "cpu_ratio": quotient(1000 * cpu, 1000 * base_cpu),
    }


def quotient(value: float, divisor: float) -> float:
    return float(value / divisor) if divisor > 0 else math.nan


def _intervals(part: pd.DataFrame, confidence: float) -> dict[str, Interval]:
    """Return the intervals of a task's speed-ups; a question's value is its mean over runs."""
    usable = part[part["is_usable"].eq(True) & part["base_is_usable"].eq(True)]
    exact = part[part["is_used"]]

    def interval(frame: pd.DataFrame, over: Sequence[str], under: Sequence[str]) -> Interval:
        questions = frame[[*over, *under]].groupby(level=0).mean()
        if questions.isna().any(axis=None):
            return UNKNOWN
        ratio = RatioOfSums(
            *([questions[name].to_numpy() for name in side] for side in (over, under))
        )
        return paired_interval(ratio, confidence)

    def of_rates(seconds: str) -> Interval:
        return interval(exact, ("tokens", f"base_{seconds}"), (seconds, "base_tokens"))

    return {
        "speedup": interval(usable, ["rate"], ["base_rate"]),
        "exact_speedup": of_rates("seconds"),
        "decode_speedup": of_rates("decode_seconds"),
    }
