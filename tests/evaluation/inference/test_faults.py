"""What goes wrong around a run: interrupts, full disks, memory that runs out, clocks and models that
lie. Kills are in test_kill_and_resume, dying workers in test_workers.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.inference import method as method_answerer
from evaluation.inference.answering import Prompt
from evaluation.inference.method import LOW_MEMORY_DEPTH, LowMemoryDrafter
from model.backends.target import TargetModel
from model.budget.cost_model import CostModel
from model.budget.paced import CostAwareDrafter
from tests.evaluation.conftest import (
    QUESTIONS,
    ROOT,
    error_line,
    figures,
    read_meta,
    read_rows,
    run,
    token_ids,
)
from tests.evaluation.inference.test_loop import Spy, answer
from tests.hang import HANG

STEPS = ("token_ids", "accept_lengths", "draft_tokens", "turns")
KEPT = 4096  # bytes that a disk takes, as far as the process knows
RUN = """
import runpy
runpy.run_module("evaluation.inference_recycling", run_name="__main__", alter_sys=True)
"""
# Ctrl-C comes while the third question is answered, however slow the machine is.
INTERRUPTED = (
    """
import signal
from evaluation.inference.method import MethodAnswerer
answer, num_begun = MethodAnswerer.answer, 0
def interrupted(self, prompt):
    global num_begun
    num_begun += prompt.begins_question
    if prompt.begins_question and num_begun == 3:
        signal.raise_signal(signal.SIGINT)
    return answer(self, prompt)
MethodAnswerer.answer = interrupted
"""
    + RUN
)


class InterruptedSpy(Spy):
    """Gets Ctrl-C some times while it answers the second question."""

    def __init__(self, times: int) -> None:
        super().__init__(fails_on="nothing")
        self._times = times

    def answer(self, prompt: Prompt) -> Any:
        if prompt.question.turns == ("bad",):
            for _ in range(self._times):
                signal.raise_signal(signal.SIGINT)
        return super().answer(prompt)


@pytest.mark.parametrize(("times", "rows_left"), [(1, [1, 2]), (2, [1])])
def test_one_interrupt_finishes_the_question_and_two_do_not(
    times: int, rows_left: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        answer(InterruptedSpy(times), tmp_path / "a.jsonl", num_warmup=0)
    assert [row["question_id"] for row in read_rows(tmp_path / "a.jsonl")] == rows_left
    assert "finishing this question" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before, "Ctrl-C was not given back"


def run_alone(
    options: list[str], file: Path, code: str = RUN, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Make a run with a hot matrix in a process of its own."""
    command = [sys.executable, "-c", code, *options, "--answer-file", str(file)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False, **more
    )


def test_an_interrupted_command_exits_with_130_and_is_gone_on_with(
    options: list[str], tmp_path: Path
) -> None:
    uncut, file = tmp_path / "uncut.jsonl", tmp_path / "cut.jsonl"
    assert run("recycling", options, uncut) == 0
    done = run_alone(options, file, INTERRUPTED)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert len(read_rows(file)) == 3, "the question under way is finished"
    assert run("recycling", options, file) == 0
    assert figures(read_rows(file), *STEPS) == figures(read_rows(uncut), *STEPS)


def limited() -> None:
    """Let this process write no file beyond some bytes, as on a disk that is full then."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (KEPT, KEPT))


def test_a_disk_that_fills_up_ends_the_run_with_one_line_and_whole_rows(
    options: list[str], tmp_path: Path
) -> None:
    uncut, file = tmp_path / "uncut.jsonl", tmp_path / "full.jsonl"
    more = [*options, "--policy", "average", "--start", "cold"]
    assert run("recycling", more, uncut) == 0
    assert uncut.stat().st_size > KEPT, "the limit would not be met"
    done = run_alone(more, file, preexec_fn=limited)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: answer file {file}: a row cannot be written: ")
    assert "Traceback" not in done.stderr
    assert 1 <= len(read_rows(file)) < QUESTIONS, "only whole rows may be left"
    assert run("recycling", more, file) == 0
    assert figures(read_rows(file), *STEPS) == figures(read_rows(uncut), *STEPS)


def test_a_matrix_that_the_disk_does_not_take_loses_no_row(
    options: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "full.jsonl"
    done = run_alone(options, file, preexec_fn=limited)  # the hot matrix takes 256 kB
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stderr.splitlines()[-1]
    assert file.read_bytes() == b"", "a row without its matrix could not be gone on with"
    assert run("recycling", options, file) == 0
    assert len(read_rows(file)) == QUESTIONS


@pytest.mark.usefixtures("no_weights")
def test_a_folder_that_takes_no_file_is_refused_before_the_weights_load(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line("vanilla", [*options, "--answer-file", "/proc/answers.jsonl"], capsys)
    assert "/proc/answers.jsonl" in line
    assert "cannot be written" in line


class FullSpy(Spy):
    """Runs out of memory over a question until it is asked with little memory, and then perhaps again."""

    def __init__(self, is_hopeless: bool) -> None:
        super().__init__(fails_on="nothing")
        self._is_hopeless = is_hopeless
        self.num_low_memory = 0

    def answer(self, prompt: Prompt) -> Any:
        self.num_low_memory += prompt.is_low_memory
        if prompt.question.turns == ("bad",) and (self._is_hopeless or not prompt.is_low_memory):
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return super().answer(prompt)


@pytest.mark.parametrize("is_hopeless", [False, True])
def test_a_question_that_runs_out_of_memory_is_asked_once_more_in_a_lean_way(
    is_hopeless: bool, tmp_path: Path
) -> None:
    spy = FullSpy(is_hopeless)
    assert answer(spy, tmp_path / "a.jsonl", num_warmup=0) == is_hopeless
    first, second, third = read_rows(tmp_path / "a.jsonl")
    assert second["retried_after"] == "OutOfMemoryError: tried to allocate 9 GiB"
    assert second.get("error") == (second["retried_after"] if is_hopeless else None)
    assert bool(second["choices"]) is not is_hopeless
    assert spy.num_low_memory == 1
    assert "retried_after" not in first and "retried_after" not in third


def test_a_method_that_starts_cold_knows_nothing_of_the_answer_that_failed(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = method_answerer.generate
    lengths = []
    for is_late in (False, True):

        def short_of_memory(
            target: Any, drafter: Any, *given: Any, is_late: bool = is_late, **named: Any
        ) -> Any:
            is_low_memory = isinstance(drafter, LowMemoryDrafter)
            answer = (
                generate(target, drafter, *given, **named) if is_low_memory or is_late else None
            )
            if not is_low_memory:
                raise torch.OutOfMemoryError("no room for a tree")
            return answer

        monkeypatch.setattr(method_answerer, "generate", short_of_memory)
        file = tmp_path / f"{is_late}.jsonl"
        cold = ("--policy", "average", "--start", "cold")
        assert run("recycling", options, file, "--question-end", 1, *cold) == 0
        (row,) = read_rows(file)
        assert row["retried_after"]
        lengths.append(row["choices"][0]["accept_lengths"])
    assert lengths[0] == lengths[1]


def test_a_lean_drafter_is_priced_with_the_model_that_drafts() -> None:
    costs = CostModel((1,), (2.0,), (2.0,))
    drafter = CostAwareDrafter(None, 9, torch.device("cpu"))
    drafter.draft_costs = lambda: costs  # type: ignore[method-assign]
    assert LowMemoryDrafter(drafter).draft_costs() is costs


@pytest.mark.parametrize("method", ["recycling", "lookahead"])
def test_lean_answers_are_those_of_vanilla_with_short_chains(
    method: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, low_memory = tmp_path / "plain.jsonl", tmp_path / "low_memory.jsonl"
    run("vanilla", options, plain, "--question-end", 3)
    generate = method_answerer.generate

    def short_of_memory(target: Any, drafter: Any, *given: Any, **named: Any) -> Any:
        if not isinstance(drafter, LowMemoryDrafter):
            raise torch.OutOfMemoryError("no room for a tree")
        return generate(target, drafter, *given, **named)

    monkeypatch.setattr(method_answerer, "generate", short_of_memory)
    assert run(method, options, low_memory, "--question-end", 3) == 0
    rows = read_rows(low_memory)
    assert token_ids(low_memory) == token_ids(plain)
    assert all("retried_after" in row for row in rows)
    for choice in (row["choices"][0] for row in rows):
        for drafted, steps in zip(choice["draft_tokens"], choice["decoding_steps"], strict=True):
            assert drafted <= LOW_MEMORY_DEPTH * steps
    assert any(sum(row["choices"][0]["draft_tokens"]) for row in rows), "nothing was drafted"


def test_a_clock_that_goes_backwards_harms_nothing(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 2e9

    def backwards() -> float:
        nonlocal now
        now -= 3600
        return now

    file = tmp_path / "run.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", backwards)
        assert run("recycling", options, file) == 0
    rows, meta = read_rows(file), read_meta(file)
    assert len(rows) == QUESTIONS
    assert rows[0]["tstamp"] > rows[-1]["tstamp"], "the clock did not go backwards"
    assert meta["end_time"] < meta["start_time"]
    for row in rows:
        for name in ("wall_time", "prefill_time", "decode_time"):
            assert all(0 < seconds < 3600 for seconds in row["choices"][0][name])


@pytest.mark.parametrize("method", ["vanilla", "recycling"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_and_never_a_text(
    value: float, method: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, answer = TargetModel.run, method_answerer.MethodAnswerer.answer
    num_begun = 0

    def counted(self: Any, prompt: Any) -> Any:
        nonlocal num_begun
        num_begun += prompt.begins_question
        return answer(self, prompt)

    def broken(self: Any, *given: Any, **named: Any) -> torch.Tensor:
        logits = forward(self, *given, **named)
        return logits * value if num_begun == 2 else logits

    monkeypatch.setattr(TargetModel, "run", broken)
    monkeypatch.setattr(method_answerer.MethodAnswerer, "answer", counted)
    file = tmp_path / "run.jsonl"
    assert run(method, options, file, "--question-end", 3) == 1
    rows = read_rows(file)
    assert ["error" in row for row in rows] == [False, True, False]
    assert rows[1]["error"].startswith("InvalidLogitsError: ")
    assert rows[1]["choices"] == []
