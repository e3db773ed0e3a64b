"""Questions answered by several replicas of a model at a time, through Ray.

A worker is a process with a model of its own, on its own GPUs or CPU threads. Questions wait in one
queue; an idle worker takes the next, so that long answers do not leave others idle. A worker that
dies is replaced and its question asked again, twice at most. Only the caller writes rows.

A matrix that is kept across questions is the worker's own: a row says which worker answered, and
how many questions its matrix had seen. With memory passed in, one worker answers in order, and the
memory goes from question to question, as in a run without workers.
"""

from __future__ import annotations

import logging
import re
import socket
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from evaluation.answers.row import AnswerRow
from evaluation.inference.answering import Finished, rows_of, warm_up
from evaluation.inference.method import MethodAnswerer
from evaluation.inference.plan import Memory, Plan
from evaluation.questions.questions import Question
from model.commands.command_line import UserError, first_line, show_notes
from model.commands.loading import load_target
from model.kernels.registered_attention import turn_off_cudnn

# A question whose worker dies may itself be the cause.
MAX_RETRIES = 2
# Time limit for the first connection to a cluster.
CONNECT_SECONDS = 10.0


class Worker:
    """One model in a process of its own; `number` names it in rows, from 1."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._num_seen = 0

    def load(self, plan: Plan, threads: int, question: Question) -> tuple[str | None, list[str]]:
        """Load the model; return the user's mistake if there was one, and notes for the log."""
        show_notes()
        torch.set_num_threads(threads)
        turn_off_cudnn(plan.model.device)
        try:
            self._answerer = MethodAnswerer(plan, load_target(plan.run.model, plan.model))
        except UserError as error:
            return str(error), []
        self._asking = plan.asking
        warm_up(self._answerer, self._asking, question, plan.run.answers.warmup)
        if plan.start_memory:
            self._answerer.drafter.load_memory(plan.start_memory)
        return None, self._answerer.notes()

    def answer(self, question: Question, memory: Memory | None) -> Finished:
        """Answer one question.

        `memory` is that after the questions before, empty before the first; None: the worker's own goes on.
        """
        answerer = self._answerer
        if memory:
            answerer.drafter.load_memory(memory)
        (row,) = rows_of(answerer, self._asking, [question])
        row = row.plus(worker=self._number)
        if answerer.drafter.is_hot and memory is None:
            row = row.plus(questions_before=self._num_seen)
        self._num_seen += 1
        return Finished(row, {} if memory is None else answerer.memory())


class _Pool:
    """The workers, the questions that wait for one, and those being answered."""

    def __init__(
        self, plan: Plan, questions: Sequence[Question], memory: Memory | None, threads: int
    ) -> None:
        self._plan = ray.put(plan)
        self._model_id = plan.model_id
        self._threads = threads
        self._waiting, self._first = deque(questions), questions[0]
        self._num_deaths: Counter[int | str] = Counter()  # of workers over a question
        self._memory = memory
        # The worker, and what it answers; None: it loads its model.
        self._under_way: dict[Any, tuple[Any, Question | None]] = {}
        self._num_started = 0
        self._num_lost_loading = 0
        num_gpus = plan.run.model.num_gpus_per_model if plan.model.device.type == "cuda" else 0
        self._actor = ray.remote(num_cpus=threads, num_gpus=num_gpus)(Worker)

    def start_worker(self) -> None:
        self._num_started += 1
        worker: Any = self._actor.remote(self._num_started)
        loading = worker.load.remote(self._plan, self._threads, self._first)
        self._under_way[loading] = (worker, None)

    def finished(self) -> Iterator[Finished]:
        while self._waiting or any(question for _, question in self._under_way.values()):
            done, _ = ray.wait(list(self._under_way), num_returns=1)
            worker, question = self._under_way.pop(done[0])
            try:
                result = ray.get(done[0])
            except RayError as error:
                yield from self._lost(worker, question, first_line(error))
                continue
            if question is None:
                mistake, notes = result
                if mistake:
                    raise UserError(mistake)
                self._num_lost_loading = 0
                for note in notes if self._num_started == 1 else ():
                    print(note, file=sys.stderr)
            elif self._memory is not None:
                self._memory = result.memory
            if self._waiting:
                # Before the row is written, so that the worker does not wait for the disk.
                following = self._waiting.popleft()
                answering = worker.answer.remote(following, self._memory)
                self._under_way[answering] = (worker, following)
            if question is not None:
                yield result

    def _lost(self, worker: Any, question: Question | None, cause: str) -> Iterator[Finished]:
        """Replace a dead worker; its question goes to another worker, or fails after the last retry."""
        ray.kill(worker)
        if question is None:
            self._num_lost_loading += 1
            if self._num_lost_loading > MAX_RETRIES:
                raise UserError(f"workers die while they load the model: {cause}")
        else:
            self._num_deaths[question.question_id] += 1
            num_deaths = self._num_deaths[question.question_id]
            if num_deaths <= MAX_RETRIES:
                self._waiting.appendleft(question)
            else:
                error = f"WorkerDied: {num_deaths} workers died over this question: {cause}"
                row = AnswerRow.of_question(question, self._model_id, [], error)
                yield Finished(row, self._memory or {})
        if self._waiting:
            self.start_worker()


def answer_by_workers(
    plan: Plan, questions: Sequence[Question], memory: Memory | None
) -> Iterator[Finished]:
    """Yield the rows of the questions, each once, in the order in which they are finished.

    With a memory one worker answers the questions in order, beginning with it, and every row comes with the memory
    after it; None: each worker has its own. A `UserError` if the model cannot be loaded.
    """
    if memory is not None and plan.run.worker_count > 1:
        print(
            "--state-order single: the matrix goes from question to question, so that one worker "
            "answers all",
            file=sys.stderr,
        )
    pool = _Pool(plan, questions, memory, _threads(plan))
    for _ in range(1 if memory is not None else min(plan.run.worker_count, len(questions))):
        pool.start_worker()
    yield from pool.finished()


@contextmanager
def cluster(plan: Plan) -> Iterator[None]:
    """Start Ray on this machine, or connect to the given cluster, while questions are answered.

    A `UserError` if the cluster cannot be reached or is too small.
    """
    run = plan.run
    num_cpus = run.worker_count * _threads(plan)
    needed = {"CPU": num_cpus}
    if plan.model.device.type == "cuda":
        needed["GPU"] = run.workers.num_gpus_total
    # "local" also where an environment variable names a cluster.
    address = run.workers.ray_address or "local"
    local: dict[str, Any] = {}
    if address == "local":
        # Ray lowers its workers' priority (niceness 15), which would slow all measured times.
        local = {"num_cpus": num_cpus, "_system_config": {"worker_niceness": 0}}
    if place := re.fullmatch(r"(?:ray://)?([^/:]+):(\d{1,5})", address):
        try:  # Ray itself goes on trying for minutes
            socket.create_connection((place[1], int(place[2])), CONNECT_SECONDS).close()
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            raise UserError(
                f"ray_address: got {address}; nothing answers there: {first_line(error)}"
            ) from error
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"ray_address: got {run.workers.ray_address}; Ray cannot be reached: {first_line(error)}"
        ) from error
    there = ray.cluster_resources()
    for kind, number in needed.items():
        if there.get(kind, 0) < number:
            ray.shutdown()
            raise UserError(
                f"workers: need {number} {kind}s in all; Ray has {there.get(kind, 0):.0f}; ask for fewer workers "
                "or threads, or give --ray-address of a larger cluster"
            )
    try:
        yield
    finally:
        ray.shutdown()


def _threads(plan: Plan) -> int:
    return torch.get_num_threads() if plan.model.device.type == "cpu" else 1
