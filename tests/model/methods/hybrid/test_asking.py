"""Heads beside the hybrid are asked where that is faster, by the time of whole steps.

Run: pytest tests/model/methods/hybrid/test_asking.py
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from model.budget.cost_model import CostModel
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.methods.hybrid.asking import FIRST_PERIOD, LONGEST_PERIOD, TRIAL, Asking
from model.methods.hybrid.drafter import HybridConfig, HybridDrafter
from tests.model.decoded import heads_folder, random_ids, referee, target_of

LLAMA = "Llama, grouped heads"
MS = 10**6
CURVE = (1.0, 1.05, 1.1)
LENGTH = 20  # steps of a text


def with_head() -> HybridDrafter:
    """Return a hybrid with random heads and an automatic budget, whose costs are known."""
    target = target_of(LLAMA)
    config = HybridConfig(head=f"eagle={heads_folder('eagle', target.config)}", num_nodes=7)
    drafter = HybridDrafter(config, target.vocab_size, torch.device("cpu"))
    drafter.check_target(target)
    drafter.costs = CostModel((1, 4, 8), CURVE, CURVE)
    return drafter


def asked_of(asking: Asking, num_texts: int, tokens: Sequence[float], times: Sequence[int]) -> int:
    """Return in how many steps heads were asked, by tokens and times of steps without and with them."""
    count = 0
    for _ in range(num_texts):
        asking.begin_text()
        shows_states = asking.wants_states
        for _ in range(LENGTH):
            way = asking.is_asked
            assert shows_states or not way, "it has no states to go on from"
            count += way
            asking.learn(int(tokens[way]), times[way])
    return count


def test_heads_that_cost_more_than_they_bring_are_tried_more_and_more_rarely() -> None:
    asking = Asking()
    assert asked_of(asking, 1, (2, 3), (1, 2)) == TRIAL
    assert asked_of(asking, FIRST_PERIOD // LENGTH, (2, 3), (1, 2)) == 0
    assert asked_of(asking, 2, (2, 3), (1, 2)) == TRIAL
    assert asked_of(asking, 20 * LONGEST_PERIOD // LENGTH, (2, 3), (1, 2)) < 25 * TRIAL


def test_a_trial_that_falls_far_behind_ends_at_once() -> None:
    asking = Asking()
    asked_of(asking, 1, (2, 3), (1, 9))
    assert asked_of(asking, 2 + FIRST_PERIOD // LENGTH, (2, 3), (1, 9)) == 2


def test_heads_that_pay_are_asked_but_for_trials() -> None:
    asking, num_texts = Asking(), 10 * LONGEST_PERIOD // LENGTH
    assert asked_of(asking, num_texts, (2, 5), (1, 2)) > 0.95 * num_texts * LENGTH


def test_what_has_changed_is_noticed() -> None:
    asking, num_texts = Asking(), 4 * LONGEST_PERIOD // LENGTH
    asked_of(asking, 4 * FIRST_PERIOD // LENGTH, (2, 3), (1, 2))
    assert asked_of(asking, num_texts, (1, 3), (1, 2)) > 0.5 * num_texts * LENGTH


@pytest.mark.parametrize(("head_time", "time_without"), [(0, 3 * MS), (50 * MS, MS)])
def test_a_hybrid_asks_its_heads_by_the_time_of_its_steps(
    monkeypatch: pytest.MonkeyPatch, head_time: int, time_without: int
) -> None:
    target = target_of(LLAMA)
    drafter = with_head()
    now = 0
    asked = []

    def guesses(*arguments: object) -> None:
        nonlocal now
        now += head_time
        asked.append(now)

    def forward(tree: DraftTree, cache: object) -> torch.Tensor:
        nonlocal now
        now += MS if drafter._asking.is_asked else time_without
        return own(tree, cache)  # type: ignore[arg-type]

    own = target.forward
    monkeypatch.setattr(target, "now_ns", lambda: now)
    monkeypatch.setattr(target, "forward", forward)
    monkeypatch.setattr(drafter._head, "guesses", guesses)
    prompt = random_ids(12, 2)
    for _ in range(3):
        found = generate(target, drafter, prompt, max_new_tokens=100)
        assert found.token_ids == referee(target, prompt, 100)
    if head_time:
        assert len(asked) <= 2 * TRIAL and not drafter.needs.hidden_layers
    else:
        assert len(asked) > 4 * TRIAL and drafter.needs.hidden_layers


def test_a_prompt_is_read_when_heads_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(LLAMA)
    drafter = with_head()
    reads: list[int] = []
    text = drafter._head._text  # type: ignore[attr-defined]
    own = text.read
    monkeypatch.setattr(
        text, "read", lambda ids, hidden: (reads.append(len(ids)), own(ids, hidden))
    )
    asking, prompt = drafter._asking, random_ids(12, 2)
    monkeypatch.setattr(asking, "learn", lambda *_: None)
    asking.is_asked = False  # as in a trial
    generate(target, drafter, prompt, max_new_tokens=20)
    assert not reads
    asking.is_asked = True
    found = generate(target, drafter, prompt, max_new_tokens=20)
    assert reads[0] >= len(prompt) - 1, "all at once, when it was asked"
    assert found.token_ids == referee(target, prompt, 20)
