"""A drafter that is left out of some steps goes on drafting after them.

Run: pytest tests/model/methods/test_skipped_steps.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.drafter import Drafter, VerifiedStep
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.methods import METHODS
from tests.model.decoded import drafter_for, random_ids, referee, target_of

LLAMA = "Llama, grouped heads"
# Methods that copy from the text, with options under which they do so after two tokens.
COPYING: list[tuple[str, dict[str, Any]]] = [
    ("pld", {}),
    ("toolspec", {}),
    ("samd", {"threshold": 1}),
    ("suffix", {}),
    ("racer", {"ngram": 5}),
    ("logitspec", {}),
    ("goose", {}),
    ("cacheback", {}),
    ("hybrid", {"budget": "fixed"}),
]


class Resting(Drafter):
    """Leaves a drafter out of two of three steps."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.config, drafter.vocab_size, drafter.device)
        self.max_nodes, self.needs = drafter.max_nodes, drafter.needs
        self._drafter = drafter
        self._num_steps = 0

    def for_target(self, target: Any) -> Drafter:
        self._drafter.for_target(target)
        return self

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._drafter.start(prompt_ids)

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        self._drafter.observe_prompt(token_ids, logits)

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self._drafter.observe_prompt_hidden(token_ids, hidden)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        self._num_steps += 1
        self._rests = self._num_steps % 3 != 0
        return (
            DraftTree.chain(context[-1:]) if self._rests else self._drafter.propose(context, budget)
        )

    def observe(self, step: VerifiedStep) -> None:
        if self._rests and not self.needs.hidden_layers:
            self._drafter.skip(step.acceptance.tokens)
        else:
            self._drafter.observe(step)


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_right_and_drafts_come_between(method: str) -> None:
    target, prompt = target_of(LLAMA), random_ids(12, 3)
    drafter = drafter_for(method, target)
    for _ in range(2):
        found = generate(target, Resting(drafter), prompt, max_new_tokens=30)
        assert found.token_ids == referee(target, prompt, 30)
    if method != "vanilla":
        assert any(step.num_nodes > 1 for step in found.steps)


@pytest.mark.parametrize(("method", "options"), COPYING)
def test_the_copy_goes_on_after_skipped_tokens(method: str, options: dict[str, Any]) -> None:
    drafter = drafter_for(method, target_of(LLAMA), **options)
    prompt = list(range(1, 21))
    drafter.start(prompt)
    for new in ([1, 2], [3], [4, 5]):
        drafter.skip(new)
    text = [*prompt, 1, 2, 3, 4, 5]
    tree = drafter.propose(text, DraftBudget(9))
    tokens, topology = tree.token_ids.tolist(), tree.topology
    drafted = {
        tuple(tokens[each] for each in topology.path_to(node)) for node in range(topology.num_nodes)
    }
    assert (5, 6, 7) in drafted


@pytest.mark.parametrize(("method", "options"), COPYING)
def test_what_was_skipped_is_copied_from(method: str, options: dict[str, Any]) -> None:
    drafter = drafter_for(method, target_of(LLAMA), **options)
    drafter.start([1, 2, 3])
    skipped = list(range(30, 50))
    for begin in range(0, 20, 2):
        drafter.skip(skipped[begin : begin + 2])
    if method == "racer":  # which links new n-grams when the next text begins
        drafter.start([1, 2, 3])
    drafter.skip([9, 32, 33, 34])
    tree = drafter.propose([1, 2, 3, *skipped, 9, 32, 33, 34], DraftBudget(9))
    assert 35 in tree.token_ids.tolist()
