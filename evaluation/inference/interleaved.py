"""A comparison: one loaded model and any servers, every question, or as many as a batch holds, answered by every
entrant in turn.

Wall-clock figures of separate processes drift with the machine. Here a slow minute slows all
entrants, the baseline included, and ratios stay. Every entrant has its own memory, answer file and
sidecar, as its inference command writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import shortuuid
import torch

from evaluation.answers.log import AnswerLog
from evaluation.answers.record import BASELINE, NOISE_FLOOR
from evaluation.answers.row import AnswerRow
from evaluation.inference.config import RunConfig
from evaluation.inference.endpoint.answers import EndpointAnswerer
from evaluation.inference.endpoint.config import EndpointMethod
from evaluation.inference.endpoint.plan import EndpointPlan, prepare_endpoint
from evaluation.inference.entrants import Entrant, baseline_again
from evaluation.inference.llama_cpp import LlamaCpp, LlamaCppAnswerer
from evaluation.inference.loop import Finished, record, report
from evaluation.inference.method import (
    MethodAnswerer,
    eos_ids,
    method_answerer,
    print_notes,
    stop_of,
)
from evaluation.inference.plan import (
    Asked,
    Plan,
    asked_questions,
    check_asked,
    model_answers,
    prepare,
)
from evaluation.inference.question import Answerer
from evaluation.inference.referees import BATCHES, Referee, RefereeAnswerer, generate_settings
from evaluation.inference.rows import rows_of, warm_up
from evaluation.questions.questions import Question
from model.commands.command_line import UserError
from model.commands.loading import CheckedModel, load_target
from model.commands.model_options import ModelOptions
from model.engine.target import TargetModel

T = TypeVar("T")
Memory = dict[str, torch.Tensor] | None
AnyPlan = Plan | EndpointPlan


def in_turn(entrants: Sequence[T], num_parts: int) -> Iterator[tuple[int, T]]:
    """Yield the index of every part of the questions with every entrant, in orders in which each follows each other
    equally often.

    The entrant before leaves its data in the processor's caches: under one fixed order the same
    entrant would always profit. The orders are E. J. Williams's (Experimental designs balanced for the
    estimation of residual effects of treatments, 1949).
    """
    count = len(entrants)
    places = [0, *((1 + step // 2) * (1 if step % 2 == 0 else -1) for step in range(count - 1))]
    for index in range(num_parts):
        order = [entrants[(place + index) % count] for place in places]
        is_reversed = count % 2 and (index // count) % 2
        for entrant in reversed(order) if is_reversed else order:
            yield index, entrant


def compare_methods(
    entrants: Sequence[Entrant],
    run: RunConfig,
    folder: str | None = None,
    name: str | None = None,
    num_runs: int = 1,
    load: Callable[[ModelOptions, CheckedModel], TargetModel] = load_target,
) -> int:
    """Answer a benchmark's questions with all entrants in turn; the baseline answers twice.

    The answer files lie in `folder` (None: the benchmark's) and their names begin with `name` (None: the
    model's). `load` returns the model on its device; who has it there already hands it in. Returns 1 if a
    question failed, else 0.
    """
    entrants = [*entrants, baseline_again(entrants)]
    for entrant in entrants:
        if isinstance(entrant.method, Referee):
            entrant.method.check(run)
    has_model = not all(entrant.is_served for entrant in entrants)
    if not has_model and run.questions.prompt_tokens:
        raise UserError(
            f"prompt_tokens: got {run.questions.prompt_tokens} with servers only, whose tokenizer is not known"
        )
    asked = check_asked(run) if has_model else None
    question_file, questions = (
        (asked.question_file, asked.questions) if asked else asked_questions(run)
    )
    folder = str(folder or model_answers(run.questions))
    name = name or (asked.model_name if asked else "served")
    together = {
        "interleaved_with": [entrant.label for entrant in entrants],
        "interleaved_run": shortuuid.uuid(),
    }
    runs: list[list[AnyPlan]] = []
    with ExitStack() as logs:
        for number in range(1, num_runs + 1):
            suffix = "" if num_runs == 1 else f"-run-{number}"
            runs.append([])
            for entrant in entrants:
                role = _role(entrant, entrants)
                about = together | ({"role": role} if role else {})
                file = _answer_file(asked, entrant, run, f"{folder}/{name}", suffix)
                plan: AnyPlan
                if entrant.is_served:
                    plan = prepare_endpoint(
                        entrant.config, run, questions, question_file, file, about
                    )
                else:
                    assert asked is not None, "a method needs a model"
                    plan = _plan(asked, entrant, run, file, about)
                logs.callback(plan.log.close)
                runs[-1].append(plan)
        plans = [plan for plans in runs for plan in plans]
        if not all(plan.is_answered for plan in plans):
            _answer(asked, questions, runs, load)
        for plan in plans:
            plan.log.finish()
        return report([plan.log for plan in plans])


def _role(entrant: Entrant, entrants: Sequence[Entrant]) -> str | None:
    """Return the role of an entrant's file: second run or baseline; None for a method that is compared."""
    if entrant.is_again:
        return NOISE_FLOOR
    return BASELINE if entrant.is_served and entrant is entrants[0] else None


def _answer_file(
    asked: Asked | None, entrant: Entrant, run: RunConfig, start: str, suffix: str
) -> Path:
    is_local = asked is not None and not entrant.is_served
    dtype = [str(asked.model.dtype).removeprefix("torch.")] if asked and is_local else []
    size = run.answers.batch_size
    facts = [f"temp-{run.sampling.temperature}", str(run.sampling.max_new_tokens)]
    facts += [f"batch-{size}"] * (size > 1)
    return Path("-".join((start, entrant.label, *dtype, *facts)) + f"{suffix}.jsonl")


def _plan(
    asked: Asked, entrant: Entrant, run: RunConfig, file: Path, about: Mapping[str, Any]
) -> Plan:
    assert not isinstance(entrant.method, EndpointMethod), "it has a plan of its own"
    model_id = file.name.removesuffix(".jsonl")
    answers = replace(run.answers, model_id=model_id, answer_file=str(file))
    if isinstance(entrant.method, Referee):
        about = {**about, **entrant.method.circumstances()}
    return prepare(
        asked,
        entrant.method,
        replace(run, answers=answers),
        entrant.config,
        circumstances=about,
    )


def _answer(
    asked: Asked | None,
    questions: Sequence[Question],
    runs: Sequence[Sequence[AnyPlan]],
    load: Callable[[ModelOptions, CheckedModel], TargetModel],
) -> None:
    """Load the model, if a method decodes with one, and answer the questions that the logs lack."""
    every = [plan for plans in runs for plan in plans]
    plans = [plan for plan in every if isinstance(plan, Plan)]
    for of_run in runs:
        _warn_of_earlier_answers(of_run)
    # Before the weights load: one may be missing.
    memories = {plan.setup.model_id: plan.memory() for plan in plans if not plan.is_answered}
    target = None
    if asked:
        target = load(plans[0].setup.run.model, asked.model)
        _settle_threads(plans, target)
        for plan in plans:
            plan.note_kernels(target)
    num_rows = len(questions) * len(every)
    num_done = sum(len(questions) - len(plan.log.remaining(questions)) for plan in every)
    record(_finished(questions, runs, target, memories), num_rows, num_done)


def _warn_of_earlier_answers(plans: Sequence[AnyPlan]) -> None:
    """Warn if some entrants have more answers than others: these were not measured in turn."""
    done = [len(plan.log.done) for plan in plans]
    most = min(done) + _batch_size(plans[0])
    if max(done) > most:
        ahead = [
            plan.log.file.stem for plan, count in zip(plans, done, strict=True) if count > most
        ]
        print(
            f"WARNING: answers of {', '.join(ahead)} exist already, and were not measured in turn with "
            "those to come; --overwrite measures all of them again",
            file=sys.stderr,
        )


def _settle_threads(plans: Sequence[Plan], target: TargetModel) -> None:
    known = sorted({plan.threads for plan in plans if plan.threads})
    if len(known) > 1:
        raise UserError(
            f"threads: earlier answers were made with {' and '.join(map(str, known))} threads; give --overwrite"
        )
    if not known:
        plans[0].settle_threads(target)
    for plan in plans:
        plan.note_threads()


def _batch_size(plan: AnyPlan) -> int:
    run = plan.setup.run if isinstance(plan, Plan) else plan.run
    return run.answers.batch_size


def _finished(
    questions: Sequence[Question],
    runs: Sequence[Sequence[AnyPlan]],
    target: TargetModel | None,
    memories: Mapping[str, Memory],
) -> Iterator[tuple[AnswerLog, Finished]]:
    """Yield every missing row with its log, run by run, each with drafters of its own.

    An entrant answers as many questions in turn as it has under way; where its batch then stands still, the texts
    that have not ended go on in its next turn. A server's have ended by then.
    """
    size = _batch_size(runs[0][0])
    parts = [questions[begin : begin + size] for begin in range(0, len(questions), size)]
    for plans in runs:
        entrants = [
            (plan, *_ready(plan, target, memories)) for plan in plans if not plan.is_answered
        ]
        # A run whose answers are all there has no entrant left.
        for index, (plan, answerer, rows) in in_turn(entrants, len(parts) * bool(entrants)):
            for row in islice(rows, len(plan.log.remaining(parts[index]))):
                yield plan.log, Finished(row, answerer.memory())
        for plan, answerer, _ in entrants:
            if isinstance(answerer, MethodAnswerer):
                plan.log.note(held_bytes=answerer.held_bytes())


def _ready(
    plan: AnyPlan, target: TargetModel | None, memories: Mapping[str, Memory]
) -> tuple[Answerer | EndpointAnswerer, Iterator[AnswerRow]]:
    """Return an entrant after warm-up, with the memory of its earlier answers, and its rows to come.

    Its file is begun.
    """
    if isinstance(plan, EndpointPlan):
        return plan.ready(in_parts=True)
    assert target is not None, "a method needs a model"
    setup, memory = plan.setup, memories[plan.setup.model_id]
    answerer: Answerer
    if isinstance(setup.method, LlamaCpp):
        most, path = setup.run.sampling.max_new_tokens, setup.run.model.model_path
        answerer = LlamaCppAnswerer(target, path, setup.config, most, setup.longest_text)
    elif isinstance(setup.method, Referee):
        limit, ends = setup.run.sampling.max_new_tokens, eos_ids(setup, target)
        settings = generate_settings(setup.run.sampling, stop_of(setup))
        answerer = RefereeAnswerer(target, setup.config, limit, ends, settings)
        if (size := setup.run.answers.batch_size) > 1:
            answerer.batch = BATCHES[setup.method.name](target, limit, ends, size, settings)
    else:
        answerer = method_answerer(setup, target)
        print_notes(answerer.notes())
    remaining = plan.log.remaining(plan.questions)
    warm_up(answerer, setup.conversation, remaining[0], setup.run.answers.warmup)
    if memory and isinstance(answerer, MethodAnswerer):
        answerer.drafter.load_memory(memory)
    plan.log.begin()
    return answerer, rows_of(answerer, setup.asking, remaining)
