"""Workers through Ray: every question once, whoever dies, and a matrix whose order can be forced."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evaluation.inference.config import RunConfig, WorkerOptions
from evaluation.questions.questions import Question
from model.commands.command_line import UserError
from tests.evaluation.conftest import error_line, figures, read_meta, read_rows, run
from tests.hang import HANG

pytest.importorskip("ray", reason="workers need Ray")

from evaluation.inference import workers
from evaluation.inference.workers import Worker, answer_by_workers, cluster

STEPS = ("token_ids", "accept_lengths", "draft_tokens", "turns")
OVER = "poison"


def light_worker(begin: Path) -> type:
    """Return a worker without a model, which dies over one question.

    Made here, so that Ray sends its code and no process imports torch.

    Args:
        begin: a file; a worker answers one question, and others once the file is there.
    """
    poison = OVER

    class Light:
        def __init__(self, number: int) -> None:
            self._number = number
            self._is_first = True

        def load(self, *_: object) -> tuple[None, list[str]]:
            return None, []

        def answer(self, question: Any, _: object) -> SimpleNamespace:
            if question.turns[0] == poison:
                os.kill(os.getpid(), signal.SIGKILL)
            while not (self._is_first or begin.exists()):
                time.sleep(0.01)
            self._is_first = False
            row = {"question_id": question.question_id, "pid": os.getpid(), "worker": self._number}
            return SimpleNamespace(row=SimpleNamespace(values=row), memory={})

    return Light


def light_setup(num_workers: int) -> Any:
    return SimpleNamespace(
        run=RunConfig(workers=WorkerOptions(num_workers=num_workers)),
        model=SimpleNamespace(device=torch.device("cpu")),
        model_id="light",
    )


def test_a_worker_on_a_gpu_loads_its_model_with_cudnn_attention_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object) -> None:
        raise UserError(f"cuDNN: {torch.backends.cuda.cudnn_sdp_enabled()}")

    monkeypatch.setattr(workers, "load_target", load)
    setup = light_setup(1)
    question = Question(1, "qa", ("hm",))
    said = []
    torch.backends.cuda.enable_cudnn_sdp(True)  # commands on a simulated GPU turn it off
    for name in ("cpu", "cuda"):
        setup.model.device = torch.device(name)
        said.append(Worker(1).load(setup, torch.get_num_threads(), question)[0])
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert said == ["cuDNN: True", "cuDNN: False"]


def test_a_worker_killed_under_load_is_replaced_and_a_question_that_kills_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    begin = tmp_path / "begin"
    monkeypatch.setattr(workers, "Worker", light_worker(begin))
    questions = [Question(number, "qa", ("hm",)) for number in range(30)]
    questions[3] = Question(3, "qa", (OVER,))
    rows, killed = [], None
    setup = light_setup(2)
    with cluster(setup):
        for done in answer_by_workers(setup, questions, None):
            row = done.row.values
            rows.append(row)
            if killed is None and "error" not in row:
                killed = row["worker"]
                os.kill(row["pid"], signal.SIGKILL)  # before it answers another question
                begin.touch()
    assert sorted(row["question_id"] for row in rows) == list(range(30)), "lost or doubled"
    failed = [row for row in rows if "error" in row]
    assert [row["question_id"] for row in failed] == [3]
    assert "3 workers died over this question" in failed[0]["error"]
    assert failed[0]["choices"] == []
    answered = Counter(row["worker"] for row in rows if row["question_id"] != 3)
    assert answered[killed] == 1, "the killed worker went on"
    assert max(answered) > 2, "nobody took the place of the dead"


def test_two_workers_answer_as_one_run_does_and_say_what_their_matrix_had_seen(
    options: list[str], tmp_path: Path
) -> None:
    serial, parallel = tmp_path / "serial.jsonl", tmp_path / "parallel.jsonl"
    run("vanilla", options, serial)
    assert run("recycling", options, parallel, "--num-workers", 2) == 0
    rows = read_rows(parallel)
    assert figures(rows, "token_ids") == figures(read_rows(serial), "token_ids")
    for worker in {row["worker"] for row in rows}:
        seen = [row["questions_before"] for row in rows if row["worker"] == worker]
        assert seen == list(range(len(seen)))
    meta = read_meta(parallel)
    assert (meta["num_workers"], meta["state_order"], meta["threads"]) == (2, "any", 1)
    assert meta["end_time"]
    assert not parallel.with_suffix(".state").exists(), "matrices of workers are not kept"


def test_a_forced_order_gives_the_steps_of_one_run_though_its_worker_is_killed(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serial, ordered = tmp_path / "serial.jsonl", tmp_path / "ordered.jsonl"
    run("recycling", options, serial)

    class Telling(Worker):
        def answer(self, *given: Any) -> Any:
            if (self._number, self._num_seen) == (1, 3):
                time.sleep(HANG)  # until it is killed
            done = super().answer(*given)
            return done._replace(row=done.row.plus(pid=os.getpid()))

    def killing(*given: Any) -> Iterator[Any]:
        for number, done in enumerate(answer_by_workers(*given)):
            if number == 2:
                os.kill(done.row.values["pid"], signal.SIGKILL)
            yield done

    monkeypatch.setattr(workers, "Worker", Telling)
    monkeypatch.setattr(workers, "answer_by_workers", killing)
    assert run("recycling", options, ordered, "--num-workers", 2, "--state-order", "single") == 0
    rows = read_rows(ordered)
    assert [row["worker"] for row in rows] == [1, 1, 1, 2, 2, 2]
    assert figures(rows, *STEPS) == figures(read_rows(serial), *STEPS)
    assert [row["question_id"] for row in rows] == [1, 2, 3, 4, 5, 6]
    states = list(ordered.with_suffix(".state").iterdir())
    assert [state.name for state in states] == ["rows-6.safetensors"], (
        "it could not be gone on with"
    )


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--num-workers 2 --num-gpus-total 2", ("num_workers, num_gpus_total",)),
        ("--num-gpus-total 3 --num-gpus-per-model 2", ("num_gpus_total", "got 3", "multiple")),
        ("--num-workers 0", ("num_workers", "got 0")),
        ("--state-order single", ("state_order", "without workers")),
        ("--state-order free", ("--state-order", "'free'", "--help")),
        ("--num-workers 2 --save-matrix m", ("save_matrix", "workers")),
        ("--ray-address 127.0.0.1:9", ("ray_address", "127.0.0.1:9")),
        ("--shard 3/2", ("shard", "'3/2'", "I/N")),
        ("--shard 0/2", ("shard", "'0/2'", "I/N")),
        ("--shard 9/9", ("shard", "9/9", "fewer")),
    ],
)
def test_what_workers_and_shards_cannot_do_is_said_at_once(
    more: str,
    says: tuple[str, ...],
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(address: str, **_: object) -> None:
        raise ConnectionError(f"nobody at {address}")

    monkeypatch.setattr(workers.ray, "init", init)
    answers = str(tmp_path / "answers.jsonl")
    line = error_line("recycling", [*options, "--answer-file", answers, *more.split()], capsys)
    for part in says:
        assert part in line


def test_a_mistake_that_only_the_weights_show_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mistaken:
        def __init__(self, _: int) -> None: ...

        def load(self, *_: object) -> tuple[str, list[str]]:
            return "no such weights", []

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(workers, "Worker", Mistaken)
    setup = light_setup(1)
    with pytest.raises(UserError, match="no such weights"), cluster(setup):
        list(answer_by_workers(setup, [Question(1, "qa", ("hm",))], None))
