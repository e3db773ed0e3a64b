"""Questions of a batch: who is asked when, what a failure leaves, and how shares of time add up.

Run: pytest tests/evaluation/inference/test_batch_driver.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import pytest
import torch

from evaluation.answers.row import AnswerRow, Turn
from evaluation.inference.answering import (
    Answerer,
    Asking,
    Failure,
    Prompt,
    Result,
    rows_of,
    warm_up,
)
from evaluation.questions.questions import Question
from tests.evaluation.inference.test_loop import Letters


class Countdown(Answerer):
    """Ends the turns with the lowest prompts first, one at a time, and writes down who is under way.

    What is asked again it answers alone.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.under_way: set[int] = set()
        self.seen: list[list[str]] = []
        self.asked_alone: list[str] = []

    def ask(self, slot: int, prompt: Prompt) -> None:
        assert slot not in self.under_way and 0 <= slot < self.size
        if text_of(prompt).endswith("refused"):
            raise ValueError("too long")
        self.under_way.add(slot)

    def ended(self, under_way: Mapping[int, Prompt]) -> Sequence[tuple[int, Result]]:
        assert set(under_way) == self.under_way
        for slot, prompt in under_way.items():
            if prompt.is_low_memory:
                self.under_way.remove(slot)
                self.asked_alone.append(text_of(prompt))
                return [(slot, Turn([7], [1], 3.0))]
        self.seen.append(sorted(map(text_of, under_way.values())))
        slot = min(under_way, key=lambda slot: text_of(under_way[slot]))
        self.under_way.remove(slot)
        prompt = text_of(under_way[slot])
        if "full" in prompt:
            return [(slot, Failure("OutOfMemoryError: full", True))]
        if "bad" in prompt:
            return [(slot, Failure("RuntimeError: no idea", False))]
        return [(slot, Turn([7, 8], [2], 2.0, {"share_time": 1.0}))]


def text_of(prompt: Prompt) -> str:
    return "".join(map(chr, prompt.token_ids))


def questions_of(*turns: str) -> list[Question]:
    """Return a question for each text, whose words are its turns."""
    return [Question(index, "qa", tuple(words.split())) for index, words in enumerate(turns)]


def rows(answerer: Countdown, questions: Sequence[Question], **asking: Any) -> list[AnswerRow]:
    return list(rows_of(answerer, Asking(Letters(), "spy", **asking), questions))


def test_a_question_that_ends_makes_room_for_the_next() -> None:
    answerer = Countdown(2)
    found = rows(answerer, questions_of("a", "c", "b", "d"))
    assert [row.question_id for row in found] == [0, 2, 1, 3]
    assert answerer.seen == [["a", "c"], ["b", "c"], ["c", "d"], ["d"]]


def test_the_turns_of_a_question_follow_each_other() -> None:
    answerer = Countdown(2)
    first, second = rows(answerer, questions_of("b c", "a"))
    assert (first.question_id, second.question_id) == (1, 0)
    assert answerer.seen == [["a", "b"], ["b"], ["b>2 tokens|c"]]
    assert second.choices[0].turns == ["2 tokens", "2 tokens"]
    assert second.choices[0].share_time == [1.0, 1.0] and second.choices[0].seconds == 2.0


def test_each_choice_begins_with_its_own_seed() -> None:
    answerer = Countdown(1)
    seeds = []
    ask = answerer.ask

    def noted(slot: int, prompt: Prompt) -> None:
        seeds.append(prompt.seed)
        ask(slot, prompt)

    answerer.ask = noted  # type: ignore[method-assign]
    (row,) = rows(answerer, questions_of("a b"), num_choices=2, seed=5)
    assert seeds == [5, None, 6, None]
    assert [choice.values["index"] for choice in row.choices] == [0, 1]


def test_a_batch_stands_still_between_two_rows() -> None:
    answerer = Countdown(2)
    running = rows_of(answerer, Asking(Letters()), questions_of("a", "b", "c"))
    assert [row.question_id for row in islice(running, 1)] == [0]
    assert answerer.seen == [["a", "b"]]
    assert [row.question_id for row in running] == [1, 2]


@pytest.mark.parametrize("word", ["bad", "refused"])
def test_a_question_that_fails_leaves_a_row_and_the_others_alone(word: str) -> None:
    answerer = Countdown(3)
    found = rows(answerer, questions_of("a", f"x {word}", "b", "c"))
    errors = {"bad": "RuntimeError: no idea", "refused": "ValueError: too long"}
    assert {row.question_id: row.error for row in found} == {
        0: None,
        1: errors[word],
        2: None,
        3: None,
    }
    (failed,) = (row for row in found if row.error)
    assert [choice.turns for choice in failed.choices] == [["2 tokens"]]


def test_what_did_not_fit_is_asked_again_alone() -> None:
    answerer = Countdown(2)
    found = {row.question_id: row for row in rows(answerer, questions_of("a", "full", "z"))}
    assert answerer.asked_alone == ["full"]
    assert found[1].error is None and found[1].values["retried_after"].endswith("full")
    assert found[1].choices[0].seconds == 3.0
    assert "retried_after" not in found[0].values


@pytest.mark.parametrize(("num_warmup", "expected"), [(0, 0), (1, 3), (3, 3), (5, 5)])
def test_a_warm_up_fills_the_batch(num_warmup: int, expected: int) -> None:
    answerer = Countdown(3)
    warm_up(answerer, Asking(Letters()), questions_of("a")[0], num_warmup)
    assert len(answerer.seen) == expected
    assert max(map(len, answerer.seen), default=0) == min(3, expected)


def test_an_out_of_memory_error_is_known_by_its_class() -> None:
    assert Failure.of(torch.OutOfMemoryError("x")) == ("OutOfMemoryError: x", True)
    assert Failure.of(ValueError("x")) == ("ValueError: x", False)
