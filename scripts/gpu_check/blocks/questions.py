"""Block 9: questions answered in turn, as many as the time allows."""

from __future__ import annotations

from typing import Any

from evaluation.answering.entrants import entrants_of
from evaluation.answering.referees import GENERATE
from evaluation.questions.questions import load_questions, question_file_of, spread
from evaluation.scoring.per_question import task_of
from model.commands.command_line import UserError
from model.commands.model_options import SamplingOptions
from scripts.benchmark.methods import ready
from scripts.gpu_check.answers import measure, over, summarise
from scripts.gpu_check.bench import GRAPHS, Bench
from scripts.gpu_check.findings import Findings, Table, cell

METHODS = ("vanilla", "recycling", "recycling-auto", "hybrid", GENERATE)
BENCHMARK, FALLBACK = "spec_bench", "demo"
# Fewer say nothing; the share of the time left that the answers may take.
LEAST_QUESTIONS, SHARE = 2, 0.8


def questions(bench: Bench) -> Findings:
    """Answer questions with several methods in turn."""
    found = Findings()
    bench_name = _benchmark(found)
    entrants = entrants_of(METHODS, bench.options.model_path)
    target = bench.target(GRAPHS)
    sampling = SamplingOptions(max_new_tokens=bench.sizes.num_tokens)
    methods = {one.words: ready(one, target, sampling, bench.eos_ids) for one in entrants}
    prompts = bench.prompts(bench.sizes.num_questions, bench_name)
    longest = max(map(len, prompts)) + bench.sizes.num_tokens
    seconds = 0.0
    for method in methods.values():
        method.answer(prompts[0])
        seconds += method.answer(prompts[0]).wall_time
    count = _count(bench, seconds, found)
    chosen = spread(load_questions(question_file_of(bench_name)), count)
    tasks = [task_of(question.category) for question in chosen]
    prompts = bench.prompts(count, bench_name)
    answers = measure(methods, prompts, bench.sizes.num_repetitions, longest)
    rows = summarise(answers, tasks)
    found.figures |= {"rows": rows, "num_questions": len(prompts), "bench": bench_name}
    if late := target.shapes.num_late:
        found.notes.append(f"{late} calls were captured within measured answers")
    found.tables.append(_table(rows))
    return found


def _benchmark(found: Findings) -> str:
    """Return the benchmark whose questions are here."""
    try:
        question_file_of(BENCHMARK)
    except UserError as error:
        found.notes.append(f"{error}; questions of {FALLBACK} instead")
        return FALLBACK
    return BENCHMARK


def _count(bench: Bench, seconds: float, found: Findings) -> int:
    """Return how many questions there is time for, if one takes all methods so long.

    Raises:
        TimeoutError: if there is time for next to none.
    """
    sizes = bench.sizes
    fits = int(SHARE * bench.seconds_left / (seconds * sizes.num_repetitions))
    if fits < LEAST_QUESTIONS:
        raise TimeoutError(f"time for {fits} questions; allowed: {LEAST_QUESTIONS} or more")
    if fits < sizes.num_questions:
        found.notes.append(f"time for {fits} of {sizes.num_questions} questions")
    return min(fits, sizes.num_questions)


def _table(rows: list[dict[str, Any]]) -> Table:
    def ratio(value: tuple[float, float, float] | None) -> str:
        return "-" if value is None else "{:.2f}x [{:.2f}, {:.2f}]".format(*value)

    header = ("method", "tokens/s", "/ vanilla [95%]", "/ generate [95%]", "MAT", "differ")
    body = [
        [
            row["method"],
            cell(row["tokens_per_second"], 1),
            ratio(row["speedup"]),
            ratio(row.get(over(GENERATE))),
            cell(row["mean_accepted_tokens"]),
            str(row["differing_answers"]),
        ]
        for row in rows
    ]
    return Table("questions answered in turn, passes as graphs", header, body)
