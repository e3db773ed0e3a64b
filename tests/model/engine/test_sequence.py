"""A text's steps have one order, which it holds its callers to.

Run: pytest tests/model/engine/test_text.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model.backends.target import TargetModel
from model.engine.sequence import Request, RunningSequence, WrongOrderError
from model.engine.step import StepTimer
from tests.model.decoded import drafter_for, random_ids, target_of

PROMPT = random_ids(9)


@pytest.fixture
def text() -> RunningSequence:
    """Return a text of which nothing is read."""
    target = TargetModel(target_of("Llama, grouped heads").model)
    request = Request(PROMPT, 8).checked(target)
    return RunningSequence(target, drafter_for("pld", target), request)


def concluded(text: RunningSequence) -> None:
    tree = text.propose()
    text.conclude(tree, *text.forward(tree), StepTimer())


@torch.inference_mode()
def test_a_step_after_a_step_is_in_order(text: RunningSequence) -> None:
    assert sum(text.read_prompt()) == len(PROMPT) - 1
    concluded(text)
    text.pause()
    assert text.num_new >= 1


@pytest.mark.parametrize(
    "calls",
    [
        lambda text: text.propose(),
        lambda text: (*text.read_prompt(), text.forward(text.pause()), text.propose()),
        lambda text: (*text.read_prompt(), text.propose(), text.pause()),
        lambda text: (*text.read_prompt(), text.take(1)),
        lambda text: (*text.read_prompt(), text.propose(), text.offer(1, 0.0)),
        lambda text: (*text.read_prompt(), concluded(text), [*text.read_prompt()]),
        lambda text: (
            [*text.read_prompt()],
            text.conclude(text.propose(), torch.zeros(1), None, StepTimer()),
        ),
    ],
    ids=[
        "no prompt",
        "no conclusion",
        "two drafts",
        "no offer",
        "late offer",
        "prompt twice",
        "no pass",
    ],
)
@torch.inference_mode()
def test_another_order_is_refused_in_one_line(
    text: RunningSequence, calls: Callable[[RunningSequence], object]
) -> None:
    with pytest.raises(WrongOrderError, match=r"^text: is [^\n]*; allowed: [^\n]*$"):
        calls(text)
