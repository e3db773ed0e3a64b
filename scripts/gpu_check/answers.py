"""Answers: `evaluation.compare` on the check's model, and what differs judged a tie or a bug."""

from __future__ import annotations

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
from evaluation.answers.answer_file import read_answers
from evaluation.answers.differences import compare_answers
from evaluation.answers.row import AnswerRow
from evaluation.checking.tie_or_bug import Judge
from evaluation.inference.command import participants_of
from evaluation.inference.config import AnswerOptions, DecodingOptions, QuestionOptions, RunConfig
from evaluation.inference.plan import Participant
from evaluation.inference.run import compare_methods
from evaluation.questions.questions import load_questions, question_file_of
from model.commands.command_line import UserError
from scripts.gpu_check.bench import EAGER, FUSED, GRAPHS, Bench, Found, drafter_of

BASELINE = "vanilla"
FILES = "answers"  # begins the names of answer files
# Questions and methods of each kind of target. The 4, evenly spread, are among the 25.
ASKED = {
    FUSED: (
        40,
        (
            *(BASELINE, "generate", "generate-static"),
            *("recycling-averaged", "recycling-auto", "hybrid", "pld", "suffix"),
        ),
    ),
    GRAPHS: (12, (BASELINE, "recycling-averaged", "recycling-auto", "hybrid")),
    EAGER: (4, (BASELINE, "generate", "generate-pld", "recycling-averaged", "hybrid", "pld")),
}
# On the simulated device, where only the code is tried.
FEW = (1, (BASELINE, "generate", "recycling-averaged"))
BATCHED = (BASELINE, "hybrid", "recycling-auto")
BENCHMARK, FALLBACK = "spec_bench", "demo"
# Each takes some passes in float32, of a copy of the model.
MOST_JUDGED = 6


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
    """Answer some questions on every kind of target, and judge what differs."""
    bench_name = BENCHMARK
    try:
        question_file_of(BENCHMARK)
    except UserError as error:
        found.notes.append(f"{error}; questions of {FALLBACK} instead")
        bench_name = FALLBACK
    every: list[Answered] = []
    for kind in bench.in_time([kind for kind in ASKED if kind in bench.kinds], found):
        count, methods = bench.sized(ASKED[kind], FEW)
        asked = partial(_asked, bench, found, kind, bench_name, count, methods)
        every += found.attempt(kind, asked) or []
    fused = [one for one in every if one.kind == FUSED]
    found.figures["differing_fused"] = _num_differing(fused) if fused else None
    found.figures |= {"bench": bench_name, "rows": [one.figures for one in every]}
    found.attempt("judging differences", partial(_compare, bench, every, bench_name, found))


def batches(bench: Bench, found: Found) -> None:
    """Answer questions in batches; each text must have the tokens that it has alone."""
    rows = []
    for size in bench.in_time(bench.sized((1, 2, 4, 8, 16), (1, 2)), found):
        count = bench.sized(32, 2)
        asked = partial(_asked, bench, found, bench.kinds[-1], FALLBACK, count, BATCHED, size)
        every = found.attempt(f"batches of {size}", asked) or []
        rows += [{"batch_size": size, **one.figures} for one in every]
    found.figures["rows"] = rows


def _num_differing(every: Sequence[Answered]) -> int:
    """Return how many answers of our methods differ from plain decoding's."""
    plain = next(one for one in every if one.method == BASELINE)
    ours = (one for one in every if not one.method.startswith("generate"))
    return sum(len(compare_answers(plain.rows, one.rows).differences) for one in ours)


def _asked(
    bench: Bench,
    found: Found,
    kind: str,
    bench_name: str,
    count: int,
    methods: Sequence[str],
    batch_size: int = 1,
) -> list[Answered]:
    """Let methods answer questions in turn; print the leaderboard of their answers."""
    run = RunConfig(
        model=bench.options_of(kind),
        sampling=DecodingOptions(max_new_tokens=bench.sized(128, 4)),
        questions=QuestionOptions(bench_name=bench_name, num_questions=count),
        answers=AnswerOptions(warmup=1, batch_size=batch_size),
    )
    participants = participants_of(methods, bench.options.model_path)
    target = bench.target(kind)
    with TemporaryDirectory(prefix="gpu-check-") as folder:
        with redirect_stdout(StringIO()):
            if compare_methods(
                participants, run, folder, FILES, load=lambda options, checked: target
            ):
                found.problems.append(f"{kind}: questions failed; see standard error")
            leaderboard.main([folder, "--no-published", "--markdown", f"{folder}/table.md"])
        text = Path(folder, "table.md").read_text(encoding="utf-8")
        batch = f", {batch_size} texts a pass" if batch_size > 1 else ""
        bench.show_text(f"{count} questions of {bench_name}, passes {kind}{batch}", text)
        dtype = str(bench.checked.dtype).removeprefix("torch.")
        return [Answered(kind, one.words, _rows_of(one, folder, dtype)) for one in participants]


def _rows_of(participant: Participant, folder: str, dtype: str) -> list[AnswerRow]:
    """Return a participant's answers in a folder of one comparison."""
    (file,) = Path(folder).glob(f"{FILES}-{participant.label}-{dtype}-temp-*.jsonl")
    return read_answers(file)


def _compare(bench: Bench, every: list[Answered], bench_name: str, found: Found) -> None:
    """Hold answers against eager plain decoding's; judge what differs."""
    plain = next(one for one in every if (one.kind, one.method) == (EAGER, BASELINE))
    known = plain.first_turns
    parted = [
        (one, difference)
        for one in every
        for difference in compare_answers(
            plain.rows, [row for row in one.rows if row.question_id in known]
        ).differences
    ]
    found.figures |= {"differing": len(parted), "ties": 0, "bugs": 0, "judged": []}
    # Later turns follow other texts.
    cases = [(one, it.question_id) for one, it in parted if it.parts_at_tokens and it.turn == 0]
    if not cases:
        return
    try:
        judge = Judge(bench.target(EAGER))
    except torch.OutOfMemoryError:
        found.notes.append(f"{len(parted)} answers differ; not judged: too little memory")
        return
    prompts = {
        question.question_id: bench.conversation.prompt_ids([], question.turns[0])
        for question in load_questions(question_file_of(bench_name))
    }
    judge.measure_noise_on((prompts[question_id], ids) for question_id, ids in known.items())
    for one, question_id in bench.in_time(cases[:MOST_JUDGED], found):
        judge.target = bench.target(one.kind)
        pair = (known[question_id], one.first_turns[question_id])
        drafters = (drafter_of(BASELINE, judge.target), drafter_of(one.method, judge.target))
        what = f"{one.method}, {one.kind}, question {question_id}"
        verdict = found.attempt(what, partial(judge.judge, prompts[question_id], pair, drafters))
        if verdict is not None:
            found.figures["ties" if verdict.is_tie else "bugs"] += 1
            found.figures["judged"].append({"answer": what, **asdict(verdict)})
            (found.notes if verdict.is_tie else found.problems).append(f"{what}: {verdict}")
