"""Block 5: whole answers, eager and as graphs: speed, acceptance, waits, and differences judged as ties or bugs."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

from evaluation.answering.entrants import Entrant, entrants_of
from evaluation.answering.referees import Referee
from evaluation.answers.row import Turn
from evaluation.checking.tie_or_bug import Judge
from model.commands.model_options import SamplingOptions
from scripts.benchmark.methods import ready
from scripts.gpu_check.bench import EAGER, Bench
from scripts.gpu_check.drafters import drafter_of
from scripts.gpu_check.findings import Findings, Table, cell

METHODS = (
    *("vanilla", "generate", "generate-pld", "recycling"),
    *("recycling-auto", "hybrid", "pld"),
)
BASELINE = "vanilla"
# Each takes some passes in float32.
MOST_JUDGED = 6
# A copy of the model in float32 beside it, and what its passes take.
JUDGE_MEMORY = 2.3


class Answers(NamedTuple):
    """The answers of one entrant on one kind of target."""

    kind: str
    entrant: Entrant
    turns: list[Turn]
    waits: float
    late: int

    @property
    def name(self) -> str:
        """Entrant and kind."""
        return f"{self.entrant.words}, {self.kind}"

    @property
    def row(self) -> dict[str, Any]:
        """Its figures."""
        lengths = [length for turn in self.turns for length in turn.accept_lengths]
        seconds = sum(turn.wall_time for turn in self.turns)
        num_tokens = sum(len(turn.token_ids) for turn in self.turns)
        decoding = [turn.details.get("decode_time") for turn in self.turns]
        decode_rate = num_tokens / sum(decoding) if all(decoding) else None  # type: ignore[arg-type]
        return {
            "kind": self.kind,
            "method": self.entrant.words,
            "tokens_per_second": num_tokens / seconds,
            "decode_tokens_per_second": decode_rate,
            "mean_accepted_tokens": sum(lengths) / len(lengths) if lengths else None,
            "waits_a_step": self.waits,
            "captured_late": self.late,
        }


def decoding(bench: Bench) -> Findings:
    """Decode some prompts with every entrant."""
    found = Findings()
    prompts = bench.prompts(bench.sizes.num_texts)
    answers: list[Answers] = []
    entrants = entrants_of(METHODS, bench.options.model_path)
    # Transformers' own ways to decode know nothing of our kinds.
    cases = [
        (kind, entrant)
        for kind in bench.kinds
        for entrant in entrants
        if kind == EAGER or not isinstance(entrant.method, Referee)
    ]
    for kind, entrant in bench.in_time(cases, found):
        name = f"{entrant.words}, {kind}"
        one = found.attempt(name, partial(_answers, bench, kind, entrant, prompts))
        if one is not None:
            answers.append(one)
            if one.late:
                found.problems.append(f"{name}: {one.late} calls were captured within answers")
    found.figures["rows"] = [one.row for one in answers]
    found.tables.append(_table(found.figures["rows"]))
    found.attempt("judging differences", partial(_compare, bench, answers, prompts, found))
    return found


def _answers(bench: Bench, kind: str, entrant: Entrant, prompts: list[list[int]]) -> Answers:
    """Answer all prompts after a warm-up, and the first once more, to count waits, its prompt's included."""
    target = bench.target(kind)
    sampling = SamplingOptions(max_new_tokens=bench.sizes.num_tokens)
    method = ready(entrant, target, sampling, bench.eos_ids)
    method.answer(prompts[0])
    method.prepare(max(map(len, prompts)) + bench.sizes.num_tokens)
    method.reset()
    num_late = target.shapes.num_late
    turns = [method.answer(prompt) for prompt in prompts]
    num_late = target.shapes.num_late - num_late
    with bench.counted_waits() as accounts:
        counted = method.answer(prompts[0])
        waits = accounts.num_waits / max(1, len(counted.accept_lengths))
    return Answers(kind, entrant, turns, waits, num_late)


def _compare(
    bench: Bench, answers: list[Answers], prompts: list[list[int]], found: Findings
) -> None:
    """Hold all answers against eager plain decoding's; judge what differs."""
    plain = next(one for one in answers if one.entrant.words == BASELINE and one.kind == EAGER)
    differing = [
        (one, index)
        for one in answers
        for index in range(len(prompts))
        if one.turns[index].token_ids != plain.turns[index].token_ids
    ]
    found.figures |= {"differing": len(differing), "ties": 0, "bugs": 0, "judged": []}
    if not differing:
        return
    free = torch.cuda.mem_get_info(bench.device)[0]
    model = bench.target(EAGER).model
    needed = JUDGE_MEMORY * sum(
        weight.numel() * weight.element_size() for weight in model.parameters()
    )
    if free < needed:
        found.notes.append(
            f"{len(differing)} answers differ; not judged: needs {needed:.2e} bytes free"
        )
        return
    judge = Judge(bench.target(EAGER))
    for prompt, turn in zip(prompts, plain.turns, strict=True):
        judge.measure_noise(prompt, turn.token_ids)
    for one, index in bench.in_time(differing[:MOST_JUDGED], found):
        texts = (plain.turns[index].token_ids, one.turns[index].token_ids)
        judge.target = bench.target(one.kind)
        drafters = (drafter_of(plain.entrant, judge.target), drafter_of(one.entrant, judge.target))
        what = f"{one.name}, text {index}"
        verdict = found.attempt(what, partial(judge.judge, prompts[index], texts, drafters))
        if verdict is not None:
            found.figures["ties" if verdict.is_tie else "bugs"] += 1
            found.figures["judged"].append({"answer": what, **asdict(verdict)})
            (found.notes if verdict.is_tie else found.problems).append(f"{what}: {verdict}")


def _table(rows: list[dict[str, Any]]) -> Table:
    header = ("target", "method", "tokens/s", "decode tokens/s", "MAT", "waits a step")
    keys = ("tokens_per_second", "decode_tokens_per_second", "mean_accepted_tokens", "waits_a_step")
    body = [[row["kind"], row["method"], *(cell(row[key]) for key in keys)] for row in rows]
    return Table("answers, prompts included", header, body)
