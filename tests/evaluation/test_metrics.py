"""The figures equal an independent implementation of Spec-Bench's formulas, and refuse bad rows.

Run: pytest tests/evaluation/test_metrics.py
"""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import pytest

from evaluation.command_line import UserError
from evaluation.metrics import (
    SPEC_BENCH_TASKS,
    in_task_order,
    left_out_text,
    over_runs,
    spec_bench_figures,
)
from tests.evaluation.answer_rows import CATEGORIES, Row, failed_row, make_row, random_rows

NAMES = ("pld.jsonl", "vanilla.jsonl")


def _tokenize(text: str) -> SimpleNamespace:
    return SimpleNamespace(input_ids=[1, *map(len, text.split())])


def _by_the_book(
    rows: list[Row], base_rows: list[Row], task: str, retokenise: bool
) -> dict[str, float]:
    """Spec-Bench's arithmetic, written from its description with loops and no library."""

    def belongs(row: Row) -> bool:
        in_mt_bench = row["category"] in CATEGORIES[:8]
        return task == "overall" or (in_mt_bench if task == "mt_bench" else row["category"] == task)

    speeds, base_speeds, steps = [], [], []
    for row in filter(belongs, rows):
        choice = row["choices"][0]
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        steps += choice["accept_lengths"]
    for row in filter(belongs, base_rows):
        choice = row["choices"][0]
        num_tokens = sum(choice["new_tokens"])
        if retokenise:
            num_tokens = sum(len(_tokenize(turn).input_ids) - 1 for turn in choice["turns"])
        base_speeds.append(num_tokens / sum(choice["wall_time"]))
    return {
        "questions": len(speeds),
        "mean_accepted_tokens": statistics.fmean(steps),
        "tokens_per_second": statistics.fmean(speeds),
        "base_tokens_per_second": statistics.fmean(base_speeds),
        "speedup": statistics.fmean(speeds) / statistics.fmean(base_speeds),
    }


@pytest.mark.parametrize("retokenise", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_equal_to_spec_bench(seed: int, retokenise: bool) -> None:
    rows, base_rows = random_rows(seed), random_rows(seed + 100, most=1)
    figures = spec_bench_figures(rows, base_rows[::-1], _tokenize if retokenise else None)
    assert list(figures.index) == [*SPEC_BENCH_TASKS, "overall"]
    for task in figures.index:
        expected = _by_the_book(rows, base_rows, task, retokenise)
        assert figures.loc[task, list(expected)].to_dict() == pytest.approx(expected, rel=1e-9)


def test_against_itself_is_exactly_one() -> None:
    rows = random_rows(3)
    assert (spec_bench_figures(rows, rows)["speedup"] == 1.0).all()


def test_only_occurring_tasks_are_listed_in_order() -> None:
    rows = [make_row(i, c, [2], 1.0) for i, c in enumerate(("code", "poetry", "rag", "writing"))]
    assert list(spec_bench_figures(rows, rows).index) == [
        "mt_bench",
        "rag",
        "code",
        "poetry",
        "overall",
    ]
    assert in_task_order(["zen", "overall", "qa", "art", "code", "qa"]) == [
        *("qa", "code", "art", "zen", "overall")
    ]


def test_overall_leaves_code_out_unless_it_is_all() -> None:
    rows = [make_row(1, "qa", [2, 2], 1.0), make_row(2, "code", [8], 1.0)]
    figures = spec_bench_figures(rows, rows)
    assert figures.loc["overall", "questions"] == 1
    assert figures.loc["overall", "tokens_per_second"] == 4.0
    code = spec_bench_figures(rows[1:], rows[1:])
    assert code.loc["overall"].equals(code.loc["code"])


def test_failed_and_missing_questions_are_left_out_on_both_sides() -> None:
    rows, base_rows = random_rows(1), random_rows(2, most=1)
    kept = [(row, base) for row, base in zip(rows, base_rows, strict=True)]
    rows[0] = failed_row(rows[0]["question_id"], rows[0]["category"])
    rows[1] = failed_row(rows[1]["question_id"], rows[1]["category"])
    base_rows[1] = failed_row(rows[1]["question_id"], rows[1]["category"])
    base_rows[2] = failed_row(rows[2]["question_id"], rows[2]["category"])
    del kept[:3], rows[3], kept[0], base_rows[-1], kept[-1]
    figures = spec_bench_figures(rows, base_rows, names=NAMES)
    expected = _by_the_book([r for r, _ in kept], [b for _, b in kept], "overall", False)
    overall = figures.loc["overall"]
    assert overall[list(expected)].to_dict() == pytest.approx(expected, rel=1e-9)
    counts = ["left_out", "failed", "base_failed", "missing", "base_missing"]
    assert overall[counts].tolist() == [5, 2, 2, 1, 1]
    assert left_out_text(figures, NAMES) == (
        "5 of 39 questions are left out: 2 failed in pld.jsonl, 2 failed in vanilla.jsonl, "
        "1 missing in pld.jsonl, 1 missing in vanilla.jsonl"
    )
    assert left_out_text(spec_bench_figures(rows[5:9], rows[5:9]), NAMES) is None


def test_a_task_without_an_answer_has_no_figures() -> None:
    rows = [make_row(1, "qa", [2], 1.0), failed_row(2, "rag")]
    figures = spec_bench_figures(rows, rows)
    assert figures.loc["rag", "questions"] == 0
    assert math.isnan(figures.loc["rag", "speedup"])
    assert figures.loc["overall", "speedup"] == 1.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_row_without_time_is_refused(seconds: float) -> None:
    good, timeless = make_row(7, "qa", [2], 1.0), make_row(7, "qa", [2], seconds)
    with pytest.raises(UserError, match=r"pld\.jsonl: question 7 took .* wall_time above 0"):
        spec_bench_figures([timeless], [good], names=NAMES)
    with pytest.raises(UserError, match=r"vanilla\.jsonl: question 7 took"):
        spec_bench_figures([good], [timeless], names=NAMES)


@pytest.mark.parametrize("key", ["wall_time", "accept_lengths"])
def test_missing_counters_are_named(key: str) -> None:
    good, bare = make_row(7, "qa", [2], 1.0), make_row(7, "qa", [2], 1.0)
    del bare["choices"][0][key]
    with pytest.raises(UserError, match=rf"pld\.jsonl: question 7 has no '{key}'"):
        spec_bench_figures([bare], [good], names=NAMES)


def test_files_of_different_questions_are_refused() -> None:
    rows = [make_row(81, "writing", [2], 1.0)]
    with pytest.raises(UserError, match=r"question 81 is 'writing' in .* but 'code' in"):
        spec_bench_figures(rows, [make_row(81, "code", [2], 1.0)])
    with pytest.raises(UserError, match="no question is answered in both"):
        spec_bench_figures(rows, [make_row("81", "writing", [2], 1.0)])


def test_a_baseline_without_tokens_gives_no_ratio() -> None:
    rows, base_rows = [make_row(1, "qa", [2], 1.0)], [make_row(1, "qa", [0], 1.0)]
    assert math.isnan(spec_bench_figures(rows, base_rows).loc["overall", "speedup"])


def test_runs_give_mean_and_deviation() -> None:
    runs = [spec_bench_figures(random_rows(s), random_rows(s + 9, most=1)) for s in range(3)]
    runs[1] = runs[1].drop(index="rag")
    figures = over_runs(runs)
    assert figures.num_runs == 3
    assert list(figures.mean.index) == list(runs[0].index)
    for task, used in (("qa", runs), ("rag", [runs[0], runs[2]])):
        values = [run.loc[task, "speedup"] for run in used]
        assert figures.figure(task, "speedup") == pytest.approx(statistics.fmean(values), rel=1e-9)
        assert figures.spread(task, "speedup") == pytest.approx(statistics.stdev(values), rel=1e-9)
    assert math.isnan(figures.figure("poetry", "speedup"))
    assert over_runs(runs[:1]).mean.equals(runs[0])
    assert math.isnan(over_runs(runs[:1]).spread("qa", "speedup"))
