"""Legacy figures equal an independent implementation of Spec-Bench's formulas on the same files, exact
figures one of theirs; what cannot be measured is left out, counted, or refused.

Run: pytest tests/evaluation/scoring/test_figures.py
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from types import SimpleNamespace

import pandas as pd
import pytest

from evaluation.scoring import per_question
from evaluation.scoring.figures import (
    SPEC_BENCH_TASKS,
    RunFigures,
    in_task_order,
    left_out_text,
    measure_runs,
)
from model.commands.command_line import UserError
from tests.evaluation.answers.answer_rows import (
    CATEGORIES,
    Row,
    answer_rows,
    failed_row,
    make_row,
    random_rows,
)

NAMES = ("pld.jsonl", "vanilla.jsonl")
COUNTERS = ("new_tokens", "wall_time", "decoding_steps")


def question_frame(
    rows: list[Row],
    max_new_tokens: int | None = None,
    tokenizer: per_question.Tokenizer | None = None,
) -> pd.DataFrame:
    return per_question.question_frame(answer_rows(rows), max_new_tokens, tokenizer)


def run_figures(
    frame: pd.DataFrame, base_frame: pd.DataFrame, names: tuple[str, str] = NAMES
) -> pd.DataFrame:
    return measure_runs([(frame, base_frame)], names).of_runs[0]


def _figures(rows: list[Row], base_rows: list[Row], names: tuple[str, str] = NAMES) -> pd.DataFrame:
    return run_figures(question_frame(rows), question_frame(base_rows), names)


def _measured(*runs: tuple[list[Row], list[Row]]) -> RunFigures:
    return measure_runs([(question_frame(rows), question_frame(base)) for rows, base in runs])


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
        "rows": len(speeds),
        "mean_accepted_tokens": statistics.fmean(steps),
        "tokens_per_second": statistics.fmean(speeds),
        "base_tokens_per_second": statistics.fmean(base_speeds),
        "speedup": statistics.fmean(speeds) / statistics.fmean(base_speeds),
    }


def _with_spec_bench_errors(rows: list[Row]) -> list[Row]:
    """What Spec-Bench's writer leaves: errors with the counters of the turn before, rows missing or
    twice, a step list that does not fit, tokens past the limit.
    """
    rows = copy.deepcopy(rows)
    for row in rows[::7]:
        choice = row["choices"][0]
        choice["turns"][1] = "ERROR"
        for key in COUNTERS:
            choice[key][1] = choice[key][0]
    rows[2]["choices"][0]["accept_lengths"].append(9)
    rows[3]["choices"][0]["new_tokens"][0] += 500
    return [*rows[:11], *rows[12:], rows[5]]


@pytest.mark.parametrize("retokenise", [False, True])
@pytest.mark.parametrize("change", [list, _with_spec_bench_errors])
def test_legacy_figures_are_spec_benchs_on_the_same_files(
    change: Callable[[list[Row]], list[Row]], retokenise: bool
) -> None:
    rows, base_rows = change(random_rows(1)), random_rows(2, most=1)
    base_frame = question_frame(base_rows[::-1], None, _tokenize if retokenise else None)
    figures = run_figures(question_frame(rows, 400), base_frame)
    assert list(figures.index) == [*SPEC_BENCH_TASKS, "overall"]
    for task in figures.index:
        expected = _by_the_book(rows, base_rows, task, retokenise)
        assert figures.loc[task, list(expected)].to_dict() == pytest.approx(expected, rel=1e-9)


def test_exact_figures_are_sums_before_quotients() -> None:
    rows, base_rows = random_rows(1), random_rows(2, most=1)
    for row in (*rows, *base_rows):
        row["choices"].append(copy.deepcopy(row["choices"][0]))
        row["choices"][1]["wall_time"] = [7.0, 5.0]
        for choice in row["choices"]:
            choice["decode_time"] = [0.5 * seconds for seconds in choice["wall_time"]]

    def rate(part: list[Row], limit: int, share: float = 1.0) -> float:
        tokens, seconds = 0, 0.0
        for row in part:
            for choice in row["choices"]:
                tokens += sum(min(count, limit) for count in choice["new_tokens"])
                seconds += share * sum(choice["wall_time"])
        return tokens / seconds

    limit = 60
    figures = run_figures(question_frame(rows, limit), question_frame(base_rows))
    steps = [n for row in rows for choice in row["choices"] for n in choice["accept_lengths"]]
    speedup = rate(rows, limit) / rate(base_rows, 10**9)
    expected = {
        "exact_mean_accepted_tokens": sum(steps) / len(steps),
        "exact_tokens_per_second": rate(rows, limit),
        "exact_base_tokens_per_second": rate(base_rows, 10**9),
        "exact_speedup": speedup,
        "decode_tokens_per_second": rate(rows, limit, 0.5),
        "base_decode_tokens_per_second": rate(base_rows, 10**9, 0.5),
        "decode_speedup": speedup,
        "break_even_mat": sum(steps) / len(steps) / speedup,
    }
    overall = figures.loc["overall"]
    assert overall[list(expected)].to_dict() == pytest.approx(expected, rel=1e-9)
    assert rate(rows, limit) < rate(rows, 10**9), "the limit should bind"


def test_the_rulers_part_where_a_question_takes_longer() -> None:
    rows = [make_row(1, "qa", [4], 1.0), make_row(2, "qa", [4], 4.0)]
    base_rows = [make_row(1, "qa", [4], 4.0), make_row(2, "qa", [4], 4.0)]
    overall = _figures(rows, base_rows).loc["overall"]
    assert overall["speedup"] == pytest.approx(2.5)  # (4 + 1) / 2 against 1
    assert overall["exact_speedup"] == pytest.approx(1.6)  # 8 / 5 against 1


def test_decoding_alone_is_unknown_where_one_writer_did_not_time_it() -> None:
    rows = [make_row(1, "qa", [4], 1.0, decode_time=[0.5]), make_row(2, "qa", [4], 1.0)]
    base_rows = [make_row(i, "qa", [4], 1.0, decode_time=[0.5]) for i in (1, 2)]
    figures = _measured((rows, base_rows))
    assert math.isnan(figures.figure("qa", "decode_speedup"))
    assert math.isnan(figures.figure("qa", "break_even_mat"))
    assert math.isnan(figures.interval("qa", "decode_speedup").low)
    assert figures.figure("qa", "exact_speedup") == 1.0
    assert _measured((base_rows, base_rows)).figure("qa", "break_even_mat") == 4.0


def test_against_itself_is_exactly_one_and_not_different() -> None:
    rows = random_rows(3)
    figures = _measured((rows, rows))
    for name in ("speedup", "exact_speedup"):
        assert (figures.mean[name] == 1.0).all()
        assert figures.interval("overall", name) == (1.0, 1.0)
        assert not figures.interval("overall", name).excludes_one


def test_only_occurring_tasks_are_listed_in_order() -> None:
    rows = [make_row(i, c, [2], 1.0) for i, c in enumerate(("code", "poetry", "rag", "writing"))]
    assert list(_figures(rows, rows).index) == ["mt_bench", "rag", "code", "poetry", "overall"]
    assert in_task_order(["zen", "overall", "qa", "art", "code", "qa"]) == [
        *("qa", "code", "art", "zen", "overall")
    ]


def test_overall_leaves_code_out_beside_all_tasks_of_spec_bench_alone() -> None:
    categories = ("writing", *SPEC_BENCH_TASKS[1:])
    rows = [make_row(9, "code", [8], 1.0)]
    rows += [make_row(place, name, [2, 2], 1.0) for place, name in enumerate(categories)]
    figures = _figures(rows, rows[:-1])
    assert figures.loc["overall", "questions"] == 5
    assert figures.loc["overall", "tokens_per_second"] == 4.0
    assert figures.loc["overall", "base_tokens_per_second"] == 4.0, "by the tasks of both sides"
    code = _figures(rows[:1], rows[:1])
    assert code.loc["overall"].equals(code.loc["code"])
    own = _figures(rows[:2], rows[:2])
    assert own.loc["overall", "questions"] == 2
    assert own.loc["overall", "tokens_per_second"] == 6.0


def test_a_category_called_overall_is_a_task_of_its_own() -> None:
    rows = [make_row(1, "overall", [2], 1.0), make_row(2, "mine", [4], 1.0)]
    figures = _figures(rows, rows)
    assert list(figures.index) == ["mine", "overall (category)", "overall"]
    assert figures["tokens_per_second"].tolist() == [4.0, 2.0, 3.0]


def test_exact_figures_leave_out_what_is_not_sound_on_both_sides() -> None:
    rows, base_rows = random_rows(1), random_rows(2, most=1)
    kept = list(zip(rows, base_rows, strict=True))[4:-1]
    rows[0] = failed_row(rows[0]["question_id"], rows[0]["category"])
    rows[1] = failed_row(rows[1]["question_id"], rows[1]["category"])
    base_rows[1] = failed_row(rows[1]["question_id"], rows[1]["category"])
    base_rows[2]["choices"][0]["turns"][0] = "ERROR"
    del rows[3], base_rows[-1]
    figures = _figures(rows, base_rows)
    expected = _figures([r for r, _ in kept], [b for _, b in kept]).loc["overall"]
    overall = figures.loc["overall"]
    exact = [name for name in figures if name.startswith("exact_")]
    assert overall[exact].to_dict() == pytest.approx(expected[exact].to_dict(), rel=1e-9)
    counts = ["questions", "left_out", "failed", "base_failed", "missing", "base_missing"]
    assert overall[[*counts, "base_unsound"]].tolist() == [34, 5, 2, 0, 1, 1, 1]
    assert overall[["rows", "base_rows"]].tolist() == [36, 37]
    assert left_out_text(figures, NAMES) == (
        "5 of 39 questions are left out: 2 failed in pld.jsonl, 1 missing in pld.jsonl, "
        "1 missing in vanilla.jsonl, 1 with a defect in vanilla.jsonl"
    )
    assert left_out_text(_figures(rows[5:9], rows[5:9]), NAMES) is None


def test_a_task_without_an_answer_has_no_figures() -> None:
    rows = [make_row(1, "qa", [2], 1.0), failed_row(2, "rag")]
    figures = _figures(rows, rows)
    assert figures.loc["rag", "questions"] == 0
    assert math.isnan(figures.loc["rag", "speedup"])
    assert math.isnan(figures.loc["rag", "exact_speedup"])
    assert figures.loc["overall", "speedup"] == 1.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_row_without_time_is_left_out_of_both_rulers(seconds: float) -> None:
    rows = [make_row(7, "qa", [2], 1.0), make_row(8, "qa", [2], seconds)]
    base_rows = [make_row(7, "qa", [2], 2.0), make_row(8, "qa", [2], 2.0)]
    overall = _figures(rows, base_rows).loc["overall"]
    assert overall[["rows", "base_rows", "questions", "unsound"]].tolist() == [1, 2, 1, 1]
    assert overall[["speedup", "exact_speedup"]].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("key", ["wall_time", "new_tokens"])
def test_files_without_counters_are_refused(key: str) -> None:
    good, bare = make_row(7, "qa", [2], 1.0), make_row(7, "qa", [2], 1.0)
    del bare["choices"][0][key]
    with pytest.raises(UserError, match=r"no question has figures in both pld\.jsonl and vanilla"):
        _figures([bare], [good])


def test_files_of_different_questions_are_refused() -> None:
    rows = [make_row(81, "writing", [2], 1.0)]
    with pytest.raises(UserError, match=r"question 81 is 'writing' in .* but 'code' in"):
        _figures(rows, [make_row(81, "code", [2], 1.0)])
    with pytest.raises(UserError, match="no question has figures in both"):
        _figures(rows, [make_row("81", "writing", [2], 1.0)])


def test_a_baseline_without_tokens_gives_no_ratio() -> None:
    rows, base_rows = [make_row(1, "qa", [2], 1.0)], [make_row(1, "qa", [], 1.0, [""])]
    overall = _figures(rows, base_rows).loc["overall"]
    assert overall[["speedup", "exact_speedup"]].isna().all()


def test_runs_give_mean_and_deviation() -> None:
    pairs = [(random_rows(s), random_rows(s + 9, most=1)) for s in range(3)]
    pairs[1] = tuple([row for row in side if row["category"] != "rag"] for side in pairs[1])
    runs = [_figures(*pair) for pair in pairs]
    figures = _measured(*pairs)
    assert figures.num_runs == 3
    assert list(figures.mean.index) == list(runs[0].index)
    for name in ("speedup", "exact_speedup"):
        for task, used in (("qa", runs), ("rag", [runs[0], runs[2]])):
            values = [run.loc[task, name] for run in used]
            assert figures.figure(task, name) == pytest.approx(statistics.fmean(values), rel=1e-9)
            assert figures.spread(task, name) == pytest.approx(statistics.stdev(values), rel=1e-9)
    assert math.isnan(figures.figure("poetry", "speedup"))
    single = _measured(pairs[0])
    assert single.mean.equals(runs[0].astype(single.mean.dtypes))
    assert math.isnan(single.spread("qa", "speedup"))


def _paired_speeds(num_questions: int, ratio: float) -> tuple[list[Row], list[Row]]:
    """Questions of very different length, on each of which the method is `ratio` faster, +-10%."""
    sizes = [1 + index % 13 for index in range(num_questions)]
    noise = [0.9, 1.0, 1.1]
    base_rows = [make_row(i, "qa", [1] * size, 3.0 * size**2) for i, size in enumerate(sizes)]
    rows = [
        make_row(i, "qa", [1] * size, 3.0 * size**2 / ratio * noise[i % 3])
        for i, size in enumerate(sizes)
    ]
    return rows, base_rows


def test_intervals_are_paired_and_decide_what_is_different() -> None:
    faster, same = _measured(_paired_speeds(60, 1.2)), _measured(_paired_speeds(60, 1.0))
    for name in ("speedup", "exact_speedup"):
        low, high = faster.interval("qa", name)
        assert 1.1 < low < faster.figure("qa", name) < high < 1.3
        assert faster.interval("qa", name).excludes_one
        low, high = same.interval("qa", name)
        assert low < 1 < high
        assert not same.interval("qa", name).excludes_one
    # The questions differ by a factor of 13: draws that are not paired would not see the method.
    rows, base_rows = _paired_speeds(60, 1.2)
    for place, row in enumerate(rows):
        row["question_id"] = (place + 31) % 60
    assert not _measured((rows, base_rows)).interval("qa", "speedup").excludes_one


def test_an_interval_is_over_questions_not_over_runs() -> None:
    pair = _paired_speeds(12, 1.2)
    once, twice = _measured(pair), _measured(pair, pair)
    assert once.interval("qa", "speedup") == pytest.approx(twice.interval("qa", "speedup"))
    single = _measured(_paired_speeds(1, 1.2))
    assert math.isnan(single.interval("qa", "speedup").low)
    assert not single.interval("qa", "speedup").excludes_one
