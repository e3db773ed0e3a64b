"""The one loop of all inference commands, and the entry points of Spec-Bench's own scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation.answers.log import AnswerLog
from evaluation.answers.row import AnswerRow
from evaluation.eval import Answerer, Turn, answer_questions, reorg_answer_file, run_eval
from evaluation.inference.answering import Asking, Prompt
from evaluation.questions.conversation import Message
from evaluation.questions.questions import DATA_FOLDER, Question
from model.commands.command_line import UserError
from tests.evaluation.conftest import (
    CHOICE_KEYS,
    CONTEXT,
    OUR_CHOICE_KEYS,
    ROW_KEYS,
    figures,
    read_rows,
    run,
    token_ids,
    write_rows,
)

QUESTIONS = [
    Question(1, "writing", ("one", "two")),
    Question(2, "qa", ("bad",)),
    Question(3, "qa", ("three",)),
]


class Spy(Answerer):
    """An answerer that answers with the prompt's length, and writes down what it is asked."""

    def __init__(self, fails_on: str = "bad") -> None:
        self.calls: list[str] = []
        self._fails_on = fails_on

    def answer(self, prompt: Prompt) -> Turn:
        if prompt.begins_question:
            self.calls.append("low_memory" if prompt.is_low_memory else "begin")
        if prompt.seed is not None:
            self.calls.append(f"seed {prompt.seed}")
        text = "".join(map(chr, prompt.token_ids))
        self.calls.append(f"answer {text}")
        if text == self._fails_on:
            raise RuntimeError("no idea\nand more")
        return Turn([7, 8, 9], [2, 1], 0.5)

    def end_warmup(self) -> None:
        self.calls.append("end of warm-up")


class Letters:
    """A conversation whose tokens are letters."""

    name = "letters"
    stop_ids: frozenset[int] = frozenset()

    def prompt_ids(
        self, history: Sequence[Message], user: str, system: str | None = None
    ) -> list[int]:
        said = [f"{message.user}>{message.assistant}|" for message in history]
        return [ord(letter) for letter in "".join(said) + user]

    def text(self, token_ids: Sequence[int]) -> str:
        return f"{len(token_ids)} tokens"


def answer(spy: Spy, file: Path, num_warmup: int = 3, **asking: int) -> int:
    """Answer the questions above with a spy; return how many failed."""
    log = AnswerLog(file, {"model_id": "spy"})
    log.begin()
    try:
        answer_questions(spy, Asking(Letters(), "spy", **asking), QUESTIONS, log, num_warmup)
    finally:
        log.close()
    return log.num_failed


def test_rows_have_the_keys_of_spec_bench_and_every_turn(tmp_path: Path) -> None:
    answer(Spy("nothing"), tmp_path / "a.jsonl", num_warmup=0)
    first, *_ = rows = read_rows(tmp_path / "a.jsonl")
    assert [row["question_id"] for row in rows] == [1, 2, 3]
    assert {row["model_id"] for row in rows} == {"spy"}
    assert len({row["answer_id"] for row in rows}) == 3
    for row in rows:
        assert set(row) == ROW_KEYS
        assert set(row["choices"][0]) - OUR_CHOICE_KEYS == CHOICE_KEYS
    choice = first["choices"][0]
    assert choice["turns"] == ["3 tokens", "3 tokens"]
    assert choice["decoding_steps"] == [2, 2]
    assert choice["new_tokens"] == [3, 3]
    assert choice["wall_time"] == [0.5, 0.5]
    assert choice["accept_lengths"] == [2, 1, 2, 1]
    assert choice["token_ids"] == [[7, 8, 9], [7, 8, 9]]


def test_a_question_that_fails_is_recorded_with_its_cause_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(Spy(), tmp_path / "a.jsonl", num_warmup=0) == 1
    rows = read_rows(tmp_path / "a.jsonl")
    assert [row.get("error") for row in rows] == [None, "RuntimeError: no idea\nand more", None]
    assert set(rows[1]) == {*ROW_KEYS, "error"}
    assert rows[1]["choices"] == []
    assert "question 2 failed: RuntimeError: no idea" in capsys.readouterr().err


def test_a_second_turn_that_fails_leaves_the_first_one_s_answer(tmp_path: Path) -> None:
    assert answer(Spy("one>3 tokens|two"), tmp_path / "a.jsonl", num_warmup=0) == 1
    first, *_ = read_rows(tmp_path / "a.jsonl")
    assert first["error"].startswith("RuntimeError") and AnswerRow.of(first).is_failed
    (choice,) = first["choices"]
    assert choice["turns"] == ["3 tokens"] and choice["new_tokens"] == [3]


def test_a_resumed_run_skips_what_is_answered_and_still_counts_what_failed(tmp_path: Path) -> None:
    answer(Spy(), tmp_path / "a.jsonl", num_warmup=0)
    before = (tmp_path / "a.jsonl").read_bytes()
    spy = Spy()
    assert answer(spy, tmp_path / "a.jsonl") == 1, "a failed question should not be forgotten"
    assert spy.calls == [], "nothing is left to answer or to warm up for"
    assert (tmp_path / "a.jsonl").read_bytes() == before


def test_the_prompt_of_a_turn_holds_the_turns_before(tmp_path: Path) -> None:
    spy = Spy()
    answer(spy, tmp_path / "a.jsonl", num_warmup=0)
    assert "answer one" in spy.calls
    assert "answer one>3 tokens|two" in spy.calls


def test_each_choice_has_its_own_seed_and_no_turns_of_another(tmp_path: Path) -> None:
    spy = Spy()
    answer(spy, tmp_path / "a.jsonl", num_warmup=0, num_choices=2, seed=5)
    second = "answer one>3 tokens|two"
    one_question = ["begin", "seed 5", "answer one", second, "seed 6", "answer one", second]
    assert spy.calls[1 : 1 + len(one_question)] == one_question
    choices = read_rows(tmp_path / "a.jsonl")[0]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]


@pytest.mark.parametrize("num_warmup", [0, 2])
def test_warm_up_passes_come_first_and_are_forgotten(num_warmup: int, tmp_path: Path) -> None:
    spy = Spy()
    answer(spy, tmp_path / "a.jsonl", num_warmup=num_warmup)
    question = ["begin", "seed 0", "answer one", "answer one>3 tokens|two"]
    expected = [*question * num_warmup, "end of warm-up", *question]
    assert spy.calls[: len(expected)] == expected
    assert len(read_rows(tmp_path / "a.jsonl")) == 3, "warm-up passes should not be recorded"


def test_a_warm_up_that_fails_does_not_stop_the_run(tmp_path: Path) -> None:
    assert answer(Spy(fails_on="one"), tmp_path / "a.jsonl") == 1
    assert [row.get("error", "")[:7] for row in read_rows(tmp_path / "a.jsonl")] == [
        "Runtime",
        "",
        "",
    ]


def test_a_prompt_that_does_not_fit_the_context_is_recorded_and_the_command_exits_with_1(
    options: list[str], tmp_path: Path
) -> None:
    rows = [
        {"question_id": index, "category": "qa", "turns": ["Who is it? " * count]}
        for index, count in enumerate((1, CONTEXT, 2))
    ]
    file = write_rows(tmp_path / "question.jsonl", rows)
    more = ["--question-file", str(file), "--warmup", 1]
    for method in ("vanilla", "recycling"):
        answers = tmp_path / f"{method}.jsonl"
        assert run(method, options, answers, *more) == 1
        errors = [row.get("error") for row in read_rows(answers)]
        assert (errors[0], errors[2]) == (None, None)
        assert f"fewer than the model's context of {CONTEXT}" in errors[1]
        assert run(method, options, answers, *more) == 1, "a resumed run hides the failed question"


def greedy_forward(
    inputs: Any, model: Any, tokenizer: Any, max_new_tokens: int, **_: Any
) -> tuple[torch.Tensor, int, int, list[int]]:
    """Decode as a Spec-Bench method does: one token a step, by the argmax of a whole pass."""
    ids, steps = inputs.input_ids, 0
    while steps < max_new_tokens and (steps == 0 or ids[0, -1] != tokenizer.eos_token_id):
        logits = model(ids, use_cache=False).logits[0, -1]
        ids = torch.cat((ids, logits.argmax().view(1, 1)), dim=1)
        steps += 1
    return ids, steps, steps, [1] * steps


def test_a_forward_function_of_spec_bench_runs_and_gives_the_tokens_of_vanilla(
    tiny_model: Path, options: list[str], tmp_path: Path
) -> None:
    vanilla, theirs = tmp_path / "vanilla.jsonl", tmp_path / "theirs.jsonl"
    assert run("vanilla", options, vanilla) == 0
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    question_file = str(DATA_FOLDER / "demo" / "question.jsonl")
    given: dict[str, Any] = {
        "model": model,
        "tokenizer": tokenizer,
        "forward_func": greedy_forward,
        "model_id": "theirs",
        "question_file": question_file,
        "question_begin": 0,
        "question_end": 6,
        "answer_file": str(theirs),
        "max_new_tokens": 24,
        "num_choices": 1,
        "num_gpus_per_model": 1,
        "num_gpus_total": 1,
        "temperature": 0.0,
        "do_sample": False,
    }
    assert not run_eval(**given)
    others = tmp_path / "others.jsonl"
    others.write_text(Path(question_file).read_text(encoding="utf-8") + "\n", encoding="utf-8")
    for change in ({"num_choices": 2}, {"question_file": str(others)}):
        with pytest.raises(UserError, match=next(iter(change))):
            run_eval(**given | change)
    assert token_ids(theirs) == token_ids(vanilla)
    same = ("turns", "decoding_steps", "new_tokens", "accept_lengths")
    assert figures(read_rows(theirs), *same) == figures(read_rows(vanilla), *same)
    assert all(set(row) == ROW_KEYS for row in read_rows(theirs))


def test_run_eval_takes_one_worker(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_gpus_total: got 2"):
        run_eval(None, None, greedy_forward, "x", "q", None, None, "a", 8, 1, 1, 2)


def test_reorg_answer_file_sorts_and_keeps_the_last_answer_of_each(tmp_path: Path) -> None:
    rows = [
        {"question_id": number, "choices": [index]} for index, number in enumerate((3, 1, 2, 1))
    ]
    file = write_rows(tmp_path / "a.jsonl", rows)
    file.write_text(file.read_text().removesuffix("\n"))
    reorg_answer_file(str(file))
    assert file.read_text() == "".join(json.dumps(rows[index]) + "\n" for index in (3, 2, 0))
    assert list(tmp_path.iterdir()) == [file]
