"""What noise allows to say: verdicts, the noise floor, equal prompts that took another time, CPU time.

Run: pytest tests/evaluation/scoring/test_noise.py
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from evaluation.scoring.figures import measure_runs
from evaluation.scoring.intervals import (
    UNKNOWN,
    Interval,
    SpeedVerdict,
    is_unsteady,
    largest_speedup,
    prefill_gap,
    prefill_warnings,
    speed_verdict,
)
from evaluation.scoring.per_question import question_frame
from tests.evaluation.answers.answer_rows import answer_rows, failed_row, make_row

NAMES = ("pld.jsonl", "vanilla.jsonl")


@pytest.mark.parametrize(
    ("interval", "floor", "expected"),
    [
        ((1.01, 1.10), UNKNOWN, SpeedVerdict.FASTER),
        ((0.80, 0.99), UNKNOWN, SpeedVerdict.SLOWER),
        ((0.99, 1.10), UNKNOWN, SpeedVerdict.ALIKE),
        ((1.01, 1.10), (0.97, 1.03), SpeedVerdict.ALIKE),
        ((1.04, 1.10), (0.97, 1.03), SpeedVerdict.FASTER),
        ((0.95, 0.98), (0.97, 1.03), SpeedVerdict.ALIKE),
        ((0.95, 0.96), (0.97, 1.03), SpeedVerdict.SLOWER),
        # Which run of two is above the line is arbitrary: a floor on one side of 1 counts on both.
        ((1.01, 1.06), (0.93, 1.00), SpeedVerdict.ALIKE),
        ((1.08, 1.10), (0.93, 1.00), SpeedVerdict.FASTER),
        ((0.94, 0.99), (1.00, 1.07), SpeedVerdict.ALIKE),
        ((0.90, 0.93), (1.00, 1.07), SpeedVerdict.SLOWER),
        ((1.50, 1.60), (0.85, 1.00), SpeedVerdict.UNSTEADY),
        (UNKNOWN, (0.97, 1.03), SpeedVerdict.TOO_FEW),
    ],
)
def test_verdicts(
    interval: tuple[float, float], floor: tuple[float, float], expected: SpeedVerdict
) -> None:
    assert speed_verdict(Interval(*interval), Interval(*floor)) is expected


def test_a_speed_up_is_no_larger_than_acceptance_allows() -> None:
    assert largest_speedup(1.88) == pytest.approx(1.88 * 1.10), "within what chance may do"
    assert largest_speedup(1.88, floor=Interval(0.93, 1.0)) == pytest.approx(1.88 * 1.10 / 0.93)
    assert largest_speedup(1.88, is_sure=False) == pytest.approx(1.88 * 1.5), "of few questions"
    assert math.isnan(largest_speedup(math.nan)), "not every writer counts steps"


@pytest.mark.parametrize(
    ("floor", "expected"),
    [((0.98, 1.03), False), ((0.92, 1.09), False), ((0.90, 1.00), True), ((1.2, 1.25), True)],
)
def test_a_machine_is_unsteady_where_two_runs_of_one_method_differ(
    floor: tuple[float, float], expected: bool
) -> None:
    assert is_unsteady(Interval(*floor)) is expected
    assert not is_unsteady(UNKNOWN)


def _rows(*prompts: tuple[int, float]) -> list[dict[str, Any]]:
    """A row for each prompt: its tokens and its seconds."""
    return [
        make_row(number, "qa", [1, 1], 3.0, prompt_tokens=[tokens], prefill_time=[seconds])
        for number, (tokens, seconds) in enumerate(prompts)
    ]


def test_equal_prompts_that_took_another_time_are_told() -> None:
    rows, base_rows = answer_rows(_rows((9, 1.0), (9, 2.0))), answer_rows(_rows((9, 1), (9, 1)))
    gap = prefill_gap(rows, base_rows, NAMES)
    assert gap == (*NAMES, 2, 3.0, 2.0)
    (line,) = prefill_warnings([gap, gap._replace(name="samd.jsonl", seconds=1.0)])
    assert line.startswith(
        "Reading the same 2 prompts took 2 s in vanilla.jsonl, but 3 s in pld.jsonl (1.50x), "
        "1 s in samd.jsonl (0.50x): the machine was not equally fast"
    )
    other_way = prefill_gap(base_rows, rows, NAMES)
    assert other_way and other_way.seconds == 2.0


@pytest.mark.parametrize(("seconds", "is_told"), [(1.14, False), (1.16, True), (0.88, False)])
def test_small_differences_are_not_told(seconds: float, is_told: bool) -> None:
    rows = answer_rows(_rows((9, seconds)))
    assert (prefill_gap(rows, answer_rows(_rows((9, 1.0))), NAMES) is not None) is is_told


def test_only_equal_prompts_count_and_foreign_rows_say_nothing() -> None:
    base_rows = answer_rows(_rows((9, 1.0), (9, 1.0)))
    longer = answer_rows(_rows((9, 1.0), (10, 9.0)))
    assert prefill_gap(longer, base_rows, NAMES) is None
    foreign = answer_rows([make_row(0, "qa", [1, 1], 3.0), failed_row(1, "qa")])
    assert prefill_gap(foreign, base_rows, NAMES) is None
    assert prefill_gap(base_rows, foreign, NAMES) is None
    no_time = answer_rows(_rows((9, 0.0), (9, 0.0)))
    assert prefill_gap(no_time, base_rows, NAMES) is None


def test_cpu_time_is_a_tokens_and_missing_in_foreign_rows() -> None:
    def frame(cpu: float | None) -> Any:
        keys = {} if cpu is None else {"cpu_time": [cpu]}
        return question_frame(answer_rows([make_row(1, "qa", [2, 2], 1.0, **keys)]))

    figures = measure_runs([(frame(2.0), frame(4.0))])
    names = ("cpu_ms_per_token", "base_cpu_ms_per_token", "cpu_ratio")
    assert [figures.figure("qa", name) for name in names] == [500, 1000, 0.5]
    figures = measure_runs([(frame(None), frame(4.0))])
    assert math.isnan(figures.figure("qa", "cpu_ms_per_token"))
    assert math.isnan(figures.figure("qa", "cpu_ratio"))
