"""States of a memory: which questions empty it, what counts as different, and what is refused.

Run: pytest tests/evaluation/checking/test_compare_states.py
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from evaluation import compare_states
from evaluation.answers.row import AnswerRow
from evaluation.checking.memory_states import state_figures, states_of
from evaluation.compare_states import main
from evaluation.inference.config import QuestionOptions, RunConfig
from evaluation.questions.questions import Question
from model.commands.command_line import UserError
from model.methods.samd.drafter import SamdConfig
from tests.evaluation.answers.answer_rows import answer_rows, failed_row, make_row
from tests.evaluation.conftest import read_meta, read_rows, run, token_ids, write_rows

QUESTIONS = [
    Question(number, category, ("text",))
    for number, category in enumerate(["qa", "rag", "qa", "math", "rag"])
]


def test_orders_are_seeded_and_complete() -> None:
    numbers = range(50)
    assert QuestionOptions().in_order(numbers) == numbers
    first, second = (QuestionOptions(shuffle=seed).in_order(numbers) for seed in (1, 2))
    assert sorted(first) == sorted(second) == list(numbers)
    assert first != second and first != list(numbers)
    assert first == QuestionOptions(shuffle=1).in_order(numbers)


def test_states_empty_the_memory_where_they_say() -> None:
    states = {state.name: state for state in states_of(QUESTIONS, [3])}
    assert list(states) == ["hot", "hot, shuffle 3", "per category", "cold", "warm"]
    assert not states["hot"].resets and not states["warm"].resets and states["warm"].is_warm
    assert states["cold"].resets == {0, 1, 2, 3, 4}
    per_category = states["per category"]
    assert [question.category for question in per_category.questions] == [
        *("math", "qa", "qa", "rag", "rag")
    ]
    assert per_category.resets == {3, 0, 1}
    for state in states.values():
        assert {question.question_id for question in state.questions} == {0, 1, 2, 3, 4}


def _rows(mean: float) -> list[AnswerRow]:
    rng = random.Random(1)
    rows = []
    for number in range(40):
        tokens = rng.randint(20, 90)
        steps = round(tokens / mean)
        lengths = [tokens // steps + (place < tokens % steps) for place in range(steps)]
        rows.append(make_row(number, ("qa", "rag")[number % 2], lengths, 1.0))
    return answer_rows(rows)


def test_a_state_is_different_only_beyond_the_interval() -> None:
    hot = _rows(2.0)
    shuffled = [hot[place] for place in random.Random(0).sample(range(40), 40)]
    figures = {line["state"]: line for line in state_figures({"hot": hot, "b": shuffled})}
    assert figures["b"]["ratio"] == 1 and not figures["b"]["is_different"]
    assert list(figures["hot"]["tasks"]) == ["qa", "rag", "overall"]
    figures = {line["state"]: line for line in state_figures({"hot": hot, "cold": _rows(1.5)})}
    assert figures["cold"]["is_different"] and figures["cold"]["interval"].high < 1
    assert figures["cold"]["tasks"]["overall"] == pytest.approx(1.5, abs=0.05)
    # A question that failed in one state is left out of all.
    broken = [*answer_rows([failed_row(0, "qa")]), *_rows(1.5)[1:]]
    left = state_figures({"hot": hot, "cold": broken})
    steps = [row.choices[0].accept_lengths for row in hot[1:]]
    expected = sum(map(sum, steps)) / sum(map(len, steps))
    assert left[0]["tasks"]["overall"] == pytest.approx(expected)


def test_states_are_those_of_the_inference_command(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--model-path {tiny_model} --threads 1 --max-new-tokens 16 --question-end 3".split()
    assert main(["--method", "recycling", *words, "--shuffles", "4"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    states = {line["state"]: line for line in json.loads(last)["states"]}
    assert list(states) == ["hot", "hot, shuffle 4", "per category", "cold", "warm"]
    means = {}
    for name, more in (("cold", ["--start", "cold"]), ("hot, shuffle 4", ["--shuffle", "4"])):
        file = tmp_path / f"{name}.jsonl"
        assert run("recycling", words, file, "--warmup", 0, *more) == 0
        lengths = [row["choices"][0]["accept_lengths"] for row in read_rows(file)]
        means[name] = sum(map(sum, lengths)) / sum(map(len, lengths))
        assert states[name]["tasks"]["overall"] == pytest.approx(means[name])
    assert len(set(means.values())) == 2, "both states accept alike: the test proves nothing"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--answer-file a.jsonl", "answer_file: got it with compare_states"),
        ("--start cold", "start: got cold"),
        ("--shuffles 1 1", "shuffles: got"),
        ("--tree-version auto", "tree_version: got auto, which depends on measured times"),
        (
            "--method hybrid",
            "budget: got auto, which depends on measured times.*give --budget fixed",
        ),
        ("--shuffle 1", "shuffle: got it with compare_states"),
        ("--save-matrix m", "save_matrix: got it with compare_states"),
    ],
)
def test_options_that_mean_nothing_here_are_refused(words: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        main(["--method", "recycling", *words.split()])


def test_a_shuffled_run_is_recorded_and_resumed(options: list[str], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    shuffled = [*options, "--start", "cold", "--max-new-tokens", "8", "--shuffle"]
    assert run("recycling", shuffled, whole, 1) == 0
    assert read_meta(whole)["shuffle"] == 1
    rows = read_rows(whole)
    ids = [row["question_id"] for row in rows]
    assert len(ids) > 3 and ids != sorted(ids)
    # The run as it is when it dies after two questions.
    write_rows(cut, rows[:2])
    shutil.copy(whole.with_suffix(".meta.json"), cut.with_suffix(".meta.json"))
    with pytest.raises(UserError, match="shuffle"):
        run("recycling", shuffled, cut, 2, "--model-id", rows[0]["model_id"])
    assert run("recycling", shuffled, cut, 1) == 0
    assert [row["question_id"] for row in read_rows(cut)] == ids
    assert token_ids(cut) == token_ids(whole)


def test_methods_that_leave_the_start_open_are_compared() -> None:
    nothing = argparse.Namespace(load=None, save=None)
    for start in (None, "hot"):
        compare_states._check([0], RunConfig(), SamdConfig(start=start), nothing)
    with pytest.raises(UserError, match="start: got cold; leave it out"):
        compare_states._check([0], RunConfig(), SamdConfig(start="cold"), nothing)


def test_a_matrix_of_another_vocabulary_is_found_before_the_weights_load(
    no_weights: None, tmp_path: Path
) -> None:
    file = tmp_path / "matrix.safetensors"
    rows = {"adjacency": torch.zeros(100, 8, dtype=torch.int32), "shares": torch.zeros(100, 8)}
    save_file(rows, file)
    with pytest.raises(UserError, match="vocabulary of the model"):
        main(["--method", "recycling", "--load-matrix", str(file)])
