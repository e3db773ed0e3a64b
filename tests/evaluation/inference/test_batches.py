"""Runs with several questions at a time: the answers of one by one, and shares that add up to the run's time.

Run: pytest tests/evaluation/inference/test_batches.py
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.answers.defects import row_flaws
from evaluation.answers.row import AnswerRow
from model.backends.proofs import packing
from model.budget import paced
from model.commands.command_line import UserError
from model.engine import step as engine_step
from model.engine.batch import Batch, Event
from model.methods.vanilla.drafter import VanillaDrafter
from tests.evaluation.conftest import (
    CHOICE_KEYS,
    CONTEXT,
    OUR_CHOICE_KEYS,
    ROW_KEYS,
    cut_after,
    read_meta,
    read_rows,
    run,
    token_ids,
    write_rows,
)

BATCH = ("--batch-size", 3)
METHODS = ("vanilla", "recycling", "pld --budget auto", "hybrid")


@pytest.fixture
def packed_steps(monkeypatch: pytest.MonkeyPatch) -> list[list[Event]]:
    """The events of every step of every batch."""
    found = []
    step = Batch.step

    def noted(batch: Batch) -> list[Event]:
        found.append(step(batch))
        return found[-1]

    monkeypatch.setattr(Batch, "step", noted)
    return found


def both(
    method: str, given: list[str], folder: Path, *more: object
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run a method one by one and in batches; return the rows of both."""
    name, *words = method.split()
    alone, batched = folder / "alone.jsonl", folder / "batched.jsonl"
    for file, size in ((alone, ()), (batched, BATCH)):
        assert run(name, given, file, *words, *more, *size) == 0
    assert token_ids(batched) == token_ids(alone)
    return read_rows(alone), read_rows(batched)


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_one_by_one(
    method: str, few: list[str], tmp_path: Path, packed_steps: list[list[Event]]
) -> None:
    alone, batched = both(method, few, tmp_path)
    assert all("share_time" not in row["choices"][0] for row in alone)
    for row in batched:
        assert set(row) == ROW_KEYS
        (choice,) = row["choices"]
        assert set(choice) == CHOICE_KEYS | OUR_CHOICE_KEYS | {"share_time"}
        assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
        for wall, share in zip(choice["wall_time"], choice["share_time"], strict=True):
            assert 0 < share < wall
    assert not any(row_flaws([AnswerRow.of(row) for row in batched]))
    assert max(map(len, packed_steps)) == 3
    assert read_meta(tmp_path / "batched.jsonl")["batch_size"] == 3


@pytest.mark.parametrize("method", METHODS)
def test_texts_that_cannot_share_a_pass_are_decoded_in_turn(
    method: str,
    few: list[str],
    tmp_path: Path,
    packed_steps: list[list[Event]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (packing, paced):
        monkeypatch.setattr(module, "why_not_packed", lambda target: "it is so")
    both(method, few, tmp_path)
    records = [event.record for events in packed_steps for event in events if event.record]
    assert {record.num_sequences for record in records} == {1}
    assert max(map(len, packed_steps)) == 3


def test_sampled_answers_are_those_of_one_by_one(few: list[str], tmp_path: Path) -> None:
    sampling = ("--temperature", 0.8, "--seed", 3, "--num-choices", 2, "--question-end", 4)
    both("recycling", few, tmp_path, *sampling)


def test_shares_add_up_to_the_time_of_the_run(
    few: list[str], tmp_path: Path, packed_steps: list[list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(step=10**9)
    monkeypatch.setattr(engine_step.time, "perf_counter_ns", lambda: next(ticks))
    file = tmp_path / "run.jsonl"
    assert run("recycling", few, file, *BATCH) == 0
    seconds = 0
    for events in packed_steps:
        records = [event.record for event in events if event.record is not None]
        seconds += sum(record.prefill_ns for record in records)
        seconds += records[0].step_ns if records else 0
        assert len({record.step_ns for record in records}) < 2, "they share one pass"
    (choices,) = zip(*(row["choices"] for row in read_rows(file)), strict=True)
    shares = sum(sum(choice["share_time"]) for choice in choices)
    assert shares == pytest.approx(seconds / 1e9, rel=1e-12)
    parts = sum(sum(times.values()) for choice in choices for times in choice["step_times"])
    prefill = sum(sum(choice["prefill_time"]) for choice in choices)
    assert parts + prefill == pytest.approx(shares, rel=1e-12)
    decode = sum(sum(choice["decode_time"]) for choice in choices)
    assert decode == pytest.approx(parts, rel=1e-12)


def test_one_question_that_fails_leaves_the_others_right(few: list[str], tmp_path: Path) -> None:
    rows = [
        {"question_id": index, "category": "qa", "turns": ["Who is it? " * count, "And now?"]}
        for index, count in enumerate((1, CONTEXT, 2, 3))
    ]
    file = write_rows(tmp_path / "question.jsonl", rows)
    answers = {size: tmp_path / f"{size}.jsonl" for size in (1, 3)}
    for size, path in answers.items():
        assert run("recycling", few, path, "--question-file", file, "--batch-size", size) == 1
    assert token_ids(answers[3]) == token_ids(answers[1])
    failed = {row["question_id"]: row.get("error") for row in read_rows(answers[3])}
    assert f"fewer than the model's context of {CONTEXT}" in failed.pop(1)
    assert set(failed.values()) == {None}


def test_a_drafter_that_fails_ends_its_own_text_alone(
    few: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, whole, cut = VanillaDrafter.start, tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert run("vanilla", few, whole, *BATCH) == 0
    num_started = itertools.count()

    def fails_once(drafter: VanillaDrafter, prompt_ids: Any) -> None:
        if next(num_started) == 1:
            raise RuntimeError("no idea")
        start(drafter, prompt_ids)

    monkeypatch.setattr(VanillaDrafter, "start", fails_once)
    assert run("vanilla", few, cut, *BATCH) == 1
    failed = [row["question_id"] for row in read_rows(cut) if row.get("error")]
    assert failed == [2]
    expected = token_ids(whole) | {2: []}
    assert token_ids(cut) == expected


@pytest.mark.parametrize("is_memory", [True, False])
def test_a_pass_that_fails_fails_its_texts(
    is_memory: bool, few: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory did not suffice, each is asked again alone."""
    step, whole, cut = Batch.step, tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert run("vanilla", few, whole) == 0
    num_steps = itertools.count()

    def fails_once(batch: Batch) -> list[Event]:
        if next(num_steps) == 3:
            raise torch.OutOfMemoryError("full") if is_memory else RuntimeError("no idea")
        return step(batch)

    monkeypatch.setattr(Batch, "step", fails_once)
    assert run("vanilla", few, cut, *BATCH) == (0 if is_memory else 1)
    rows = {row["question_id"]: row for row in read_rows(cut)}
    key = "retried_after" if is_memory else "error"
    assert [question for question, row in rows.items() if key in row] == [1, 2, 3]
    kept = (1, 2, 3, 4, 5) if is_memory else (4, 5)
    assert {question: token_ids(cut)[question] for question in kept} == {
        question: token_ids(whole)[question] for question in kept
    }


def test_a_cut_run_goes_on_with_the_same_batch_size(few: list[str], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert run("recycling", few, whole) == 0
    with cut_after(2):
        run("recycling", few, cut, *BATCH)
    assert len(read_rows(cut)) == 2
    with pytest.raises(UserError, match="to a run with batch_size 3, this run has 2"):
        run("recycling", few, cut, "--batch-size", 2)
    assert run("recycling", few, cut, *BATCH) == 0
    assert token_ids(cut) == token_ids(whole)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--batch-size", "0"), "batch_size: got 0; allowed: 1 or more"),
        (("--batch-size", "2", "--start", "cold"), "batch_size: got 2 with a cold start"),
        (("--batch-size", "4", "--num-workers", "2"), "batch_size: got 4 with workers"),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_what_batches_cannot_do_is_refused_before_the_weights_load(
    more: tuple[str, ...], says: str, few: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        run("recycling-averaged", few, tmp_path / "run.jsonl", *more)
