"""Answers in turn, and their figures: ratios within one run, with paired bootstrap intervals over questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from evaluation.answering.interleaved import in_turn
from evaluation.answering.referees import REFEREES
from evaluation.answers.progress import progress
from evaluation.answers.row import Turn
from evaluation.answers.step_figures import PARTS
from evaluation.scoring.intervals import paired_interval, ratio_of_rates
from scripts.benchmark.methods import Method


class Work(NamedTuple):
    """Tokens and seconds of one method on every question [Q], means over repetitions."""

    tokens: np.ndarray
    seconds: np.ndarray

    @property
    def rate(self) -> float:
        """Tokens per second over all questions."""
        return float(self.tokens.sum() / self.seconds.sum())


def speedup(work: Work, base: Work) -> tuple[float, float, float]:
    """Return the ratio of rates, with a paired bootstrap 95% interval over questions."""
    return work.rate / base.rate, *paired_interval(ratio_of_rates, [*work, *base])


def work_of(runs: list[list[Turn]], seconds: Callable[[Turn], float]) -> Work:
    """Collect tokens and seconds of a method's answers[repetition][question]."""
    tokens = np.array([[len(answer.token_ids) for answer in run] for run in runs])
    times = np.array([[seconds(answer) for answer in run] for run in runs])
    return Work(tokens.mean(axis=0), times.mean(axis=0))


def end_to_end(answer: Turn) -> float:
    """Return the seconds of an answer, prompt included."""
    return answer.wall_time


def decode_only(answer: Turn) -> float:
    """Return the seconds of an answer without its prompt; a referee does not tell them apart."""
    seconds: float = answer.details["decode_time"]
    return seconds


def over(referee: str) -> str:
    """Return the key of a method's ratio over a referee."""
    return f"speedup_over_{referee.replace('-', '_')}"


def summarise(answers: dict[str, list[list[Turn]]], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row of figures for every method, from answers[method][repetition][question]."""
    base = answers["vanilla"]
    referees = [name for name in REFEREES if name in answers]
    rows: list[dict[str, Any]] = []
    for name, runs in answers.items():
        work = work_of(runs, end_to_end)
        lengths = [length for run in runs for answer in run for length in answer.accept_lengths]
        row: dict[str, Any] = {
            "method": name,
            "tokens_per_second": work.rate,
            "speedup": speedup(work, work_of(base, end_to_end)),
            "mean_accepted_tokens": float(np.mean(lengths)) if lengths else None,
            "differing_answers": sum(
                any(mine.token_ids != plain.token_ids for mine in repetitions)
                for plain, *repetitions in zip(base[0], *runs, strict=True)
            ),
        }
        for referee in referees:
            row[over(referee)] = speedup(work, work_of(answers[referee], end_to_end))
        row["speedup_by_task"] = by_task(
            runs, answers[referees[0] if referees else "vanilla"], tasks
        )
        if name not in REFEREES:
            decode = work_of(runs, decode_only)
            row["decode_tokens_per_second"] = decode.rate
            row["decode_speedup"] = speedup(decode, work_of(base, decode_only))
            spent = {
                part: sum(answer.details["step_times"][part] for run in runs for answer in run)
                for part in PARTS
            }
            row["share_of_step"] = {part: spent[part] / sum(spent.values()) for part in PARTS}
            num_drafted = sum(answer.details["draft_tokens"] for run in runs for answer in run)
            row["nodes_per_step"] = 1 + num_drafted / len(lengths)
        rows.append(row)
    return rows


def by_task(
    runs: list[list[Turn]], base: list[list[Turn]], tasks: Sequence[str]
) -> dict[str, float]:
    """Return the end-to-end ratio of rates in every task."""
    ratios = {}
    for task in dict.fromkeys(tasks):
        chosen = [index for index, name in enumerate(tasks) if name == task]
        parts = ([[run[index] for index in chosen] for run in side] for side in (runs, base))
        mine, theirs = (work_of(part, end_to_end).rate for part in parts)
        ratios[task] = mine / theirs
    return ratios


def measure(
    methods: dict[str, Method],
    prompts: Sequence[list[int]],
    num_repetitions: int,
    longest: int = 0,
) -> dict[str, list[list[Turn]]]:
    """Return answers[method][repetition][question], interleaved, after one unmeasured answer of
    each method, and after each is prepared for texts of up to `longest` tokens.

    Memory is cleared before every repetition: nobody drafts from his own earlier answer to the same
    question.
    """
    names = list(methods)
    for name in names:
        methods[name].answer(prompts[0])
    for method in methods.values():
        method.prepare(longest)
    answers: dict[str, list[list[Turn]]] = {name: [] for name in names}
    total = num_repetitions * len(prompts) * len(names)
    with progress(total=total, unit="answer") as bar:
        for _ in range(num_repetitions):
            for name in names:
                methods[name].reset()
                answers[name].append([])
            for index, name in in_turn(names, len(prompts)):
                answers[name][-1].append(methods[name].answer(prompts[index]))
                bar.update()
    return answers
