"""ToolSpec: forced tokens first, then what followed in earlier answers or in this text.

Run: pytest tests/model/methods/test_toolspec.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.loop import generate
from model.engine.sequence import Request
from model.methods.pld.toolspec import ToolSpecConfig, ToolSpecDrafter
from tests.model.decoded import referee, target_of

CPU = torch.device("cpu")
LLAMA = "Llama, grouped heads"
PROMPT = [5, 6, 7, 8, 5, 6]
ROOMY = DraftBudget(max_depth=24)


def drafter_of(**options: Any) -> ToolSpecDrafter:
    return ToolSpecDrafter(ToolSpecConfig(**options), 50, CPU)


def drafted(drafter: ToolSpecDrafter, context: Sequence[int], budget: DraftBudget = ROOMY) -> Any:
    return drafter.propose(context, budget).token_ids.tolist()[1:]


def test_forced_tokens_come_first_and_the_lookup_goes_on_after_them() -> None:
    drafter = drafter_of(num_pred_tokens=4)
    drafter.start(PROMPT)
    assert drafted(drafter, PROMPT) == [7, 8, 5, 6]
    drafter.hint([7])
    assert drafted(drafter, PROMPT) == [7, 8, 5, 6]
    drafter.hint([9, 6])
    assert drafted(drafter, PROMPT) == [9, 6, 7, 8]
    assert drafted(drafter, PROMPT, DraftBudget(max_depth=1)) == [9]
    drafter.hint([1, 2, 3, 4, 1])
    assert drafted(drafter, PROMPT) == [1, 2, 3, 4], "no more than the chain's length"
    drafter.hint([])
    assert drafted(drafter, PROMPT) == [7, 8, 5, 6], "a hint is of one draft"


def test_earlier_answers_are_looked_up_and_the_oldest_forgotten() -> None:
    drafter = drafter_of(history=4)
    drafter.start([1, 2])
    drafter.skip([30, 31, 32, 33])
    drafter.start([3, 30])
    assert drafted(drafter, [3, 30]) == [31, 32, 33, 3, 30]
    assert drafter.memory()["answers"].tolist() == [30, 31, 32, 33]
    drafter.skip([40, 41])
    assert drafter.memory()["answers"].tolist() == [32, 33, 40, 41]
    other = drafter_of(history=4)
    other.load_memory(drafter.memory())
    other.start([40])
    assert drafted(other, [40])[0] == 41
    drafter.reset()
    assert not len(drafter.memory()["answers"])
    for wrong in ({"answers": torch.tensor([50], dtype=torch.int32)}, {"a": torch.zeros(1)}):
        with pytest.raises(ValueError, match="matrix: "):
            drafter.load_memory(wrong)


def test_hints_true_or_wrong_change_no_text() -> None:
    target = target_of(LLAMA)
    expected = referee(target, PROMPT, 30)
    lengths = {}
    for name, truth in (("true", expected), ("wrong", [3] * 40)):

        def guesses(text: Sequence[int], truth: list[int] = truth) -> list[int]:
            return truth[len(text) - len(PROMPT) :][:6]

        request = Request(PROMPT, 30)
        found = generate(target, drafter_of(), PROMPT, max_new_tokens=30, guesses=guesses)
        assert found.token_ids == expected and request.guesses is None
        lengths[name] = len(found.steps)
    assert lengths["true"] <= 6 < lengths["wrong"]
