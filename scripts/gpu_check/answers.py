"""Answers: `evaluation.compare` on the check's model, and what differs judged a tie or a bug."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from evaluation import leaderboard
from evaluation.answers import differences
from evaluation.answers.answer_file import read_answers
from evaluation.answers.row import AnswerRow
from evaluation.checking.tie_or_bug import Judge
from evaluation.inference.config import AnswerOptions, DecodingOptions, QuestionOptions, RunConfig
from evaluation.inference.participants import participants_of
from evaluation.inference.plan import Participant
from evaluation.inference.run import compare_methods
from evaluation.questions.questions import load_questions, question_file_of
from model.commands.command_line import UserError
from scripts.gpu_check.bench import EAGER, GRAPHS, KINDS, Bench, Found, drafter_of

BASELINE = "vanilla"
FILES = "answers"  # begins the names of answer files
METHODS = (
    *(BASELINE, "generate", "generate-pld", "recycling"),
    *("recycling-auto", "hybrid", "pld"),
)
# They answer as many questions as there is time for.
MOST_ASKED = (BASELINE, "recycling", "recycling-auto", "hybrid", "generate")
# On the simulated device, where only the code is tried.
FEW_METHODS = (BASELINE, "generate", "recycling")
BENCHMARK, FALLBACK = "spec_bench", "demo"
# With fewer questions the second comparison says nothing, and with more no more.
LEAST_QUESTIONS, MOST_QUESTIONS, FEW_QUESTIONS = 8, 180, 2
# The share of the time left that the answers to these may take.
SHARE = 0.8
# Each takes some passes in float32: of a copy of the model, which needs so many times its memory.
MOST_JUDGED = 6
JUDGE_MEMORY = 2.3


class Answered(NamedTuple):
    """The answers of one method on one kind of target."""

    kind: str
    method: str
    rows: list[AnswerRow]

    @property
    def figures(self) -> dict[str, Any]:
        """Its speed, prompts included, and its mean accepted tokens."""
        choices = [choice for row in self.rows for choice in row.choices]
        lengths = [length for choice in choices for length in choice.accept_lengths]
        num_tokens = sum(sum(choice.new_tokens) for choice in choices)
        return {
            "kind": self.kind,
            "method": self.method,
            "tokens_per_second": num_tokens / sum(choice.seconds for choice in choices),
            "mean_accepted_tokens": sum(lengths) / len(lengths) if lengths else None,
        }

    @property
    def first_turns(self) -> dict[int | str, list[int]]:
        return {row.question_id: row.choices[0].token_ids[0] for row in self.rows if row.choices}


def answers(bench: Bench, found: Found) -> None:
    """Answer some questions on every kind of target, then as many as there is time for as graphs."""
    bench_name = _benchmark(found)
    methods = bench.sized(METHODS, FEW_METHODS)
    first, seconds = bench.sized(4, 1), 0.0
    every: list[Answered] = []
    for kind in bench.in_time(KINDS, found):
        start = time.perf_counter()
        # Transformers' own ways to decode know nothing of our kinds.
        asked = [name for name in methods if kind == EAGER or not name.startswith("generate")]
        ask = partial(_asked, bench, found, kind, asked, bench_name, first)
        every += found.attempt(kind, ask) or []
        seconds = time.perf_counter() - start
    found.figures |= {"bench": bench_name, "rows": [one.figures for one in every]}
    found.attempt("judging differences", partial(_compare, bench, every, bench_name, found))
    count = FEW_QUESTIONS
    if not bench.is_simulated:
        count = min(MOST_QUESTIONS, int(SHARE * bench.seconds_left / seconds * first))
        if count < LEAST_QUESTIONS:
            found.notes.append(f"time for {count} questions more; give more --minutes")
            return
    most = bench.sized(MOST_ASKED, FEW_METHODS)
    ask = partial(_asked, bench, found, GRAPHS, most, bench_name, count)
    more = found.attempt(f"{count} questions", ask) or []
    found.figures |= {"num_questions": count, "more": [one.figures for one in more]}


def _benchmark(found: Found) -> str:
    try:
        question_file_of(BENCHMARK)
    except UserError as error:
        found.notes.append(f"{error}; questions of {FALLBACK} instead")
        return FALLBACK
    return BENCHMARK


def _asked(
    bench: Bench, found: Found, kind: str, methods: Sequence[str], bench_name: str, count: int
) -> list[Answered]:
    """Let methods answer questions in turn; print the leaderboard of their answers."""
    run = RunConfig(
        model=bench.options_of(kind),
        sampling=DecodingOptions(max_new_tokens=bench.sized(128, 4)),
        questions=QuestionOptions(bench_name=bench_name, num_questions=count),
        answers=AnswerOptions(warmup=1),
    )
    participants = participants_of(methods, bench.options.model_path)
    target, table = bench.target(kind), StringIO()
    with TemporaryDirectory(prefix="gpu-check-") as folder:
        with redirect_stdout(table):
            if compare_methods(
                participants, run, folder, FILES, load=lambda options, checked: target
            ):
                found.problems.append(f"{kind}: questions failed; see standard error")
            leaderboard.main([folder, "--no-published", "--markdown", f"{folder}/table.md"])
        text = Path(folder, "table.md").read_text(encoding="utf-8")
        bench.show_text(f"{count} questions of {bench_name}, passes {kind}", text)
        dtype = str(bench.checked.dtype).removeprefix("torch.")
        return [Answered(kind, one.words, _rows_of(one, folder, dtype)) for one in participants]


def _rows_of(participant: Participant, folder: str, dtype: str) -> list[AnswerRow]:
    """Return a participant's answers in a folder of one comparison."""
    (file,) = Path(folder).glob(f"{FILES}-{participant.label}-{dtype}-temp-*.jsonl")
    return read_answers(file)


def _compare(bench: Bench, every: Sequence[Answered], bench_name: str, found: Found) -> None:
    """Hold all answers against eager plain decoding's; judge what differs."""
    plain = next(one for one in every if (one.kind, one.method) == (EAGER, BASELINE))
    parted = [
        (one, difference)
        for one in every
        for difference in differences.compare_answers(plain.rows, one.rows).differences
    ]
    found.figures |= {"differing": len(parted), "ties": 0, "bugs": 0, "judged": []}
    # Later turns follow other texts.
    cases = [(one, it.question_id) for one, it in parted if it.parts_at_tokens and it.turn == 0]
    if not cases:
        return
    free = torch.cuda.mem_get_info(bench.device)[0]
    weights = bench.target(EAGER).model.parameters()
    needed = JUDGE_MEMORY * sum(weight.numel() * weight.element_size() for weight in weights)
    if free < needed:
        found.notes.append(
            f"{len(parted)} answers differ; not judged: needs {needed:.2e} bytes free"
        )
        return
    prompts = {
        question.question_id: bench.conversation.prompt_ids([], question.turns[0])
        for question in load_questions(question_file_of(bench_name))
    }
    judge = Judge(bench.target(EAGER))
    for question_id, token_ids in plain.first_turns.items():
        judge.measure_noise(prompts[question_id], token_ids)
    for one, question_id in bench.in_time(cases[:MOST_JUDGED], found):
        judge.target = bench.target(one.kind)
        pair = (plain.first_turns[question_id], one.first_turns[question_id])
        drafters = (drafter_of(BASELINE, judge.target), drafter_of(one.method, judge.target))
        what = f"{one.method}, {one.kind}, question {question_id}"
        verdict = found.attempt(what, partial(judge.judge, prompts[question_id], pair, drafters))
        if verdict is not None:
            found.figures["ties" if verdict.is_tie else "bugs"] += 1
            found.figures["judged"].append({"answer": what, **asdict(verdict)})
            (found.notes if verdict.is_tie else found.problems).append(f"{what}: {verdict}")
