"""Laws of every method for `start`, `reset`, `memory` and `propose`.

Run: pytest tests/model/engine/test_drafter.py
"""

from __future__ import annotations

import random

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.drafter import Drafter
from model.engine.loop import generate
from model.engine.step import Generation
from model.engine.tree import PROBE
from model.methods import METHODS, drafter_class
from tests.model.decoded import drafter_for, random_ids, target_of

LLAMA = "Llama, grouped heads"
FIRST, SECOND = random_ids(20, seed=1), random_ids(24, seed=2)


def answer(drafter: Drafter, prompt: list[int], num_tokens: int = 30) -> Generation:
    """Return a drafter's run on the shared model."""
    return generate(target_of(LLAMA), drafter, prompt, max_new_tokens=num_tokens)


def fresh(method: str) -> Drafter:
    """Return a fresh drafter for the shared model."""
    return drafter_for(method, target_of(LLAMA))


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_without_memory_is_fresh_after_start(method: str) -> None:
    used, expected = fresh(method), answer(fresh(method), SECOND)
    answer(used, FIRST)
    if used.keeps_memory():
        used.reset()
    found = answer(used, SECOND)
    assert found.token_ids == expected.token_ids
    assert found.accept_lengths == expected.accept_lengths


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_broken_off_leaves_no_state(method: str) -> None:
    used, expected = fresh(method), answer(fresh(method), SECOND)
    target = target_of(LLAMA)
    used.start(FIRST)
    used.propose(FIRST, DraftBudget(30))
    used.reset()
    found = generate(target, used, SECOND, max_new_tokens=30)
    assert found.accept_lengths == expected.accept_lengths


@pytest.mark.parametrize("method", METHODS)
def test_reset_clears_the_memory(method: str) -> None:
    used, empty = fresh(method), fresh(method).memory()
    answer(used, FIRST)
    if used.keeps_memory():
        assert any(tensor.any() for tensor in used.memory().values()), "nothing to clear"
    used.reset()
    assert used.memory().keys() == empty.keys()
    assert all(torch.equal(tensor, empty[name]) for name, tensor in used.memory().items())


@pytest.mark.parametrize("method", METHODS)
def test_memory_taken_over_gives_the_same_run(method: str) -> None:
    used, heir = fresh(method), fresh(method)
    answer(used, FIRST)
    heir.load_memory(used.memory())
    expected, found = answer(used, SECOND), answer(heir, SECOND)
    assert found.accept_lengths == expected.accept_lengths
    assert found.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("method", "options"),
    [*((name, {}) for name in METHODS), ("recycling", {"tree_version": "auto"})],
)
def test_memory_once_taken_stays_as_it_was(method: str, options: dict[str, str]) -> None:
    used = drafter_for(method, target_of(LLAMA), **options)
    answer(used, FIRST)
    taken = used.memory()
    expected = {name: tensor.clone() for name, tensor in taken.items()}
    answer(used, SECOND)
    used.reset()
    used.load_memory(taken)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in used.memory().items())


@pytest.mark.parametrize("method", METHODS)
def test_memory_that_does_not_fit_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match=r"allowed|keeps nothing"):
        fresh(method).load_memory({"something": torch.zeros(2)})
    assert fresh(method).keeps_memory() == bool(fresh(method).memory())


@pytest.mark.parametrize("method", METHODS)
def test_drafts_stay_inside_random_budgets(method: str) -> None:
    source = random.Random(0)
    drafter = fresh(method)
    answer(drafter, FIRST)  # so that there is something to propose
    drafter.start(SECOND)
    for _ in range(60):
        budget = DraftBudget(source.randrange(12), chain_only=source.random() < 0.5)
        tree = drafter.propose(SECOND, budget)
        tree.topology.check(budget.max_depth, budget.chain_only, drafter.max_nodes)
        assert int(tree.token_ids[0]) == SECOND[-1], "the root is the last token"
        assert tree.token_ids.shape == (tree.topology.num_nodes,)
        least = PROBE if drafter.needs.probes else 0
        assert least <= int(tree.token_ids.min()) <= int(tree.token_ids.max()) < drafter.vocab_size


@pytest.mark.parametrize("method", METHODS)
def test_configs_are_frozen_and_have_defaults(method: str) -> None:
    cls = drafter_class(method).config_class
    assert cls.__dataclass_params__.frozen
    assert cls() == cls()


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="did you mean recycling") as error:
        drafter_class("recyling")
    assert all(method in str(error.value) for method in METHODS)
