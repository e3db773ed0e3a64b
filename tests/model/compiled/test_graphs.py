"""Compiled passes for graphs: few functions serve all drafts and lengths (capture: tests/simulated_device).

Run: pytest tests/model/compiled/test_graphs.py
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import model.compiled.target
from model.budget.cost_model import CostModel
from model.budget.measure import NAME
from model.compiled.capture import CapturedCalls
from model.compiled.compiled_graphs import BUCKETS, CompiledGraphedTarget
from model.compiled.graphs import GraphedTarget, graphed
from model.engine.loop import generate
from model.engine.self_test import self_test
from model.engine.target import TargetModel
from tests.model.decoded import drafter_for, random_ids, referee
from tests.model.families.family import Family

SMALL = Family("small", "LlamaConfig", {"num_hidden_layers": 1})
COSTS = CostModel((1, 8, 16, 32, 64), (1.0, 1.01, 1.02, 1.03, 1.04), (1.1, 1.11, 1.12, 1.13, 1.14))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphedTarget]:
    """Return a target on the CPU, whose calls are traced and then run instead of being replayed."""

    def run(self: CapturedCalls, key: Hashable, call: Callable[[], Any]) -> Any:
        self.num_prepared += key not in self._captured
        self._captured[key] = None
        return call()

    monkeypatch.setattr(CapturedCalls, "run", run)
    monkeypatch.setattr(model.compiled.target, "SHORTEST_LENGTH", 64)
    torch._dynamo.reset()
    yield CompiledGraphedTarget(SMALL.build(), backend="eager", say=lambda line: None)
    torch._dynamo.reset()


# One method for each way to size drafts: the root alone, a fixed tree, chains, trees of any size, a draft model.
@pytest.mark.parametrize("method", ["vanilla", "recycling", "pld", "hybrid", "sps"])
def test_few_functions_are_compiled_for_a_method(method: str, target: GraphedTarget) -> None:
    before = counters["stats"]["unique_graphs"]
    self_test(target)
    target.measured[NAME] = COSTS
    drafter = drafter_for(method, target)
    for prompt in (random_ids(9), random_ids(40)):
        answer = generate(target, drafter, prompt, max_new_tokens=40)
        assert answer.token_ids == referee(target, prompt, 40)
    target.warm_up(150, drafter.draft_sizes)
    num_compiled = counters["stats"]["unique_graphs"] - before
    assert target.preparation.num_functions == num_compiled <= 8
    lengths = {length for _, length in target.known_shapes}
    assert len(lengths) >= 2, "one length: the count says little"
    generate(target, drafter, random_ids(100), max_new_tokens=40)
    assert counters["stats"]["unique_graphs"] - before == num_compiled, "a measured answer compiled"


def test_a_method_has_fewer_buckets_than_functions_are_allowed(target: GraphedTarget) -> None:
    sizes = [target.padded_size(count) for count in range(1, 129)]
    assert set(sizes) == set(BUCKETS) and len(BUCKETS) <= 8
    assert all(size >= count for count, size in enumerate(sizes, start=1))
    assert target.padded_size(130) == 192


def test_on_a_cpu_nothing_is_captured() -> None:
    assert type(graphed(SMALL.build(), say=pytest.fail)) is TargetModel
