"""Cost curves decide the number of drafted nodes; costs are measured once, on a steady machine, and kept.

Run: pytest tests/model/budget/test_cost_model.py
"""

from __future__ import annotations

import json
import logging
import math
import random
from itertools import count, cycle
from pathlib import Path

import pytest

from model.backends.graphs.captured import NODE_BUCKETS
from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.target import TargetModel
from model.budget import measure as module
from model.budget.cost_model import CONTEXTS, REFRESH, CostModel
from model.budget.measure import (
    CHECK_ROUNDS,
    MAX_MEASURED_NODES,
    PLAN,
    _time_in_a_row,
    measure_costs,
    read_or_measure,
)
from model.engine.budget import MARGIN, CostCurve
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.machine.timing import Clocks
from tests.model.decoded import drafter_for, random_ids, referee, target_of
from tests.model.families.family import Family

LLAMA = "Llama, grouped heads"


@pytest.fixture(autouse=True)
def unlimited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure all sizes in all rounds, on a slow machine too."""
    monkeypatch.setattr(module, "SECONDS", math.inf)
    monkeypatch.setattr(module, "CHECK_SECONDS", math.inf)


FLAT = CostCurve((1, 8, 64), (1.0, 1.0, 1.0))
STEEP = CostCurve((1, 2, 4, 8), (1.0, 2.0, 4.0, 8.0))


def test_where_nodes_are_free_all_are_drafted_and_where_they_cost_a_pass_none() -> None:
    gains = [0.9**depth for depth in range(1, 40)]
    assert FLAT.best_size(gains) == 39
    assert STEEP.best_size(gains) == 0
    assert FLAT.best_size([]) == 0


@pytest.mark.parametrize("seed", range(100))
def test_the_choice_is_the_best_rate_of_all(seed: int) -> None:
    source = random.Random(seed)
    sizes = (1, *sorted(source.sample(range(2, 40), 5)))
    costs = sorted(1 + source.random() * 3 for _ in sizes)
    cost_curve = CostCurve(sizes, tuple(costs))
    gains = sorted((source.random() for _ in range(source.randrange(50))), reverse=True)

    def rate(num_drafted: int) -> float:
        return (1 + sum(gains[:num_drafted])) / cost_curve.of(num_drafted + 1)

    choices = {0, *(min(size - 1, len(gains)) for size in sizes if size - 1 <= len(gains) + 40)}
    best = max(rate(choice) for choice in choices)
    found = rate(cost_curve.best_size(iter(gains)))
    assert found >= best / MARGIN ** (len(sizes)), "within the margins of the steps taken"


def test_gains_are_read_no_further_than_a_larger_tree_could_pay() -> None:
    read: list[int] = []

    def gains() -> object:
        for number in count():
            read.append(number)
            yield 0.01

    assert CostCurve((1, 2, 4, 64), (1.0, 1.5, 2.0, 20.0)).best_size(gains()) == 0  # type: ignore[arg-type]
    assert len(read) == 1


def test_costs_grow_with_the_context() -> None:
    costs = CostModel((1, 8), near=(1.0, 2.0), far=(2.0, 5.0))
    at = [costs.at(context).milliseconds for context in (0, *CONTEXTS, 5000)]
    assert at == sorted(at)
    assert costs.at(700).milliseconds[1] == pytest.approx(3.3, abs=0.2)


def decoded(
    costs: CostModel,
    num_nodes: int,
    milliseconds: float,
    num_steps: int,
    plain_milliseconds: float = 1.0,
) -> CostModel:
    """Return costs after this many steps of this many nodes, and the root-only steps that the switch asks for."""
    for _ in range(num_steps):
        while costs.switch.is_paused:
            costs.learn(1, 1, CONTEXTS[0], int(plain_milliseconds * 1e6))
        costs.learn(num_nodes, 8, CONTEXTS[0], int(milliseconds * 1e6))
    return costs


def test_prices_follow_what_steps_take() -> None:
    costs = CostModel((1, 4, 8), near=(1.0, 1.2, 1.4), far=(1.0, 1.2, 1.4))
    decoded(costs, 7, 2.8, 200)  # twice what was measured
    one, four, eight = costs.at(CONTEXTS[0]).milliseconds
    assert one == pytest.approx(1.0, rel=0.05)
    assert eight / one == pytest.approx(2.8, rel=0.05)
    assert four / one == pytest.approx(2.4, rel=0.1), "what other drafts cost more, it will too"
    decoded(costs, 1, 1.1, 400)
    one, _, eight = costs.at(CONTEXTS[0]).milliseconds
    assert one == pytest.approx(1.1, rel=0.02), "a step that searches in vain"
    assert eight == pytest.approx(2.8, rel=0.05)


def test_a_device_that_became_faster_changes_no_ratio() -> None:
    costs = CostModel((1, 8), near=(4.0, 6.0), far=(4.0, 6.0))
    decoded(costs, 8, 6.0, 100, plain_milliseconds=4.0)
    before = costs.at(CONTEXTS[0]).milliseconds
    assert before == pytest.approx((4.0, 6.0), rel=0.01)
    decoded(costs, 8, 3.0, 100, plain_milliseconds=2.0)
    assert costs.at(CONTEXTS[0]).milliseconds == pytest.approx((2.0, 3.0), rel=0.02)


def test_a_disturbed_step_hardly_moves_a_price() -> None:
    costs = decoded(CostModel((1, 8), near=(1.0, 1.5), far=(1.0, 1.5)), 8, 1.5, 2 * REFRESH)
    before = costs.at(CONTEXTS[0]).milliseconds[1]
    decoded(costs, 8, 900.0, 1)
    decoded(costs, 8, 1.5, REFRESH - 1)
    assert costs.at(CONTEXTS[0]).milliseconds[1] < before * 1.06


def test_a_smaller_pass_never_costs_more() -> None:
    costs = CostModel((1, 4, 8), near=(1.0, 3.0, 2.0), far=(1.0, 3.0, 2.0))
    assert costs.at(100).milliseconds == (1.0, 2.0, 2.0)


def test_a_measurement_covers_the_sizes_and_leaves_the_model_as_it_was() -> None:
    costs = measure_costs(target_of(LLAMA)).costs
    assert costs.sizes[0] == 1
    assert costs.sizes == tuple(sorted(set(costs.sizes)))
    assert len(costs.sizes) == len(costs.near) == len(costs.far)
    assert all(cost > 0 for cost in costs.near + costs.far)


def test_where_drafts_are_padded_whole_buckets_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_ROUNDS", 1)
    costs = measure_costs(GraphedTarget(target_of(LLAMA).model)).costs
    assert costs.sizes == tuple(size for size in NODE_BUCKETS if size <= MAX_MEASURED_NODES)
    assert costs.at(100).of(2) == costs.at(100).of(4)


@pytest.mark.parametrize(
    ("milliseconds", "num_passes", "expected"), [(9.0, 10, 3.0), (30.0, 1, 30.0)]
)
def test_short_passes_are_measured_in_a_row(
    milliseconds: float, num_passes: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []

    def time_pass(*_: object) -> float:
        """Take the given time, in one of ten calls or in each."""
        taken.append(milliseconds if len(taken) % num_passes == 0 else 3.0)
        return taken[-1]

    monkeypatch.setattr(module, "time_pass", time_pass)
    monkeypatch.setattr(module, "MAX_ROUNDS", 1)
    costs = measure_costs(target_of(LLAMA)).costs
    assert len(taken) == 1 + (len(PLAN) + 1) * num_passes, "one before, and one node again"
    taken.clear()
    assert _time_in_a_row(target_of(LLAMA), None, None, 0) == expected
    assert len(costs.sizes) == len({size for place, size in PLAN if place == 0})


def test_a_model_without_time_is_measured_at_one_and_eight_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.0)
    assert measure_costs(target_of(LLAMA)).costs.sizes == (1, 8)


@pytest.mark.parametrize("longest", [400, 1024, 4096])
def test_growth_with_the_context_is_that_of_a_token(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ROUNDS", 1)
    monkeypatch.setattr(
        module, "time_pass", lambda _, __, tree, base: 30.0 + 0.01 * base * len(tree.token_ids)
    )
    options = {"n_embd": 32, "n_layer": 1, "n_head": 2, "max_position_embeddings": longest}
    costs = measure_costs(TargetModel(Family("short", "GPT2Config", options).build())).costs
    for size, near, far in zip(costs.sizes, costs.near, costs.far, strict=True):
        assert near == pytest.approx(30.0 + 2.56 * size)
        assert far == pytest.approx(30.0 + 12.8 * size)


class Machine:
    """A machine whose passes take given times, with nothing measured by a clock.

    Attributes:
        is_loaded: whether other work slows passes over few rows down and takes half of the time.
        num_timed: passes timed so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_loaded = False
        self.num_timed = 0
        self._now = Clocks(0.0, 0.0)
        monkeypatch.setattr(module, "time_pass", self._time_pass)
        monkeypatch.setattr(module, "clocks", self._clocks)

    def milliseconds(self, num_nodes: int) -> float:
        """Return what a pass takes."""
        return (90.0 if self.is_loaded and num_nodes < 4 else 30.0) + num_nodes

    def _time_pass(self, _: object, __: object, tree: DraftTree, ___: int) -> float:
        self.num_timed += 1
        return self.milliseconds(len(tree.token_ids))

    def _clocks(self) -> Clocks:
        self._now = Clocks(self._now.wall + 2.0, self._now.ran + (1.0 if self.is_loaded else 1.875))
        return self._now


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Return a machine with no measurements yet."""
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    return Machine(monkeypatch)


CHECK = 1 + 2 * CHECK_ROUNDS  # passes timed by a check


def test_costs_are_measured_once_and_checked_later(machine: Machine, tmp_path: Path) -> None:
    target = target_of(LLAMA)
    made = read_or_measure(target)
    assert made.near == tuple(map(machine.milliseconds, made.sizes))
    (file,) = tmp_path.iterdir()
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["spread"] == 0.0 and written["lost"] == 0.0625
    machine.num_timed = 0
    assert read_or_measure(target) == made
    assert machine.num_timed == CHECK


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"sizes": [1], "near": ["x"], "far": []}',
        # As files of earlier versions were: nobody knows whether the machine was steady.
        '{"sizes": [1, 8], "near": [31.0, 38.0], "far": [31.0, 38.0]}',
        # Measured beside other work, as it says itself.
        '{"sizes": [1, 8], "near": [31.0, 38.0], "far": [31.0, 38.0], "spread": 0.3, "lost": 0.0}',
        '{"sizes": [1, 8], "near": [31.0, 38.0], "far": [31.0, 38.0], "spread": 0.0, "lost": 0.3}',
        # Steady, and wrong: one node, eight nodes, both alike, the ratio alone, no pass of one node.
        '{"sizes": [1, 8], "near": [91.0, 38.0], "far": [91.0, 38.0], "spread": 0.0, "lost": 0.0}',
        '{"sizes": [1, 8], "near": [31.0, 98.0], "far": [31.0, 98.0], "spread": 0.0, "lost": 0.0}',
        '{"sizes": [1, 8], "near": [62.0, 76.0], "far": [62.0, 76.0], "spread": 0.0, "lost": 0.0}',
        '{"sizes": [1, 8], "near": [28.0, 42.0], "far": [28.0, 42.0], "spread": 0.0, "lost": 0.0}',
        '{"sizes": [8], "near": [38.0], "far": [38.0], "spread": 0.0, "lost": 0.0}',
    ],
)
def test_a_wrong_file_is_measured_again(machine: Machine, tmp_path: Path, content: str) -> None:
    target = target_of(LLAMA)
    made = read_or_measure(target)
    (file,) = tmp_path.iterdir()
    right = file.read_text(encoding="utf-8")
    file.write_text(content, encoding="utf-8")
    assert read_or_measure(target) == made
    assert file.read_text(encoding="utf-8") == right


def test_a_measurement_beside_other_work_is_not_kept(
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = target_of(LLAMA)
    machine.is_loaded = True
    with caplog.at_level(logging.INFO, "model.budget"):
        busy = read_or_measure(target)
    assert busy.near[0] == machine.milliseconds(1)
    assert not list(tmp_path.iterdir())
    assert "50% of the time lost" in caplog.text
    assert capsys.readouterr() == ("", ""), "the library prints"
    machine.is_loaded = False
    quiet = read_or_measure(target)
    assert quiet.near[0] == machine.milliseconds(1) != busy.near[0]
    (file,) = tmp_path.iterdir()
    right = file.read_text(encoding="utf-8")
    machine.is_loaded = True
    assert read_or_measure(target) == busy
    assert file.read_text(encoding="utf-8") == right, "a quiet curve was lost to a busy minute"


def test_repetitions_that_differ_are_not_kept(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = cycle((30.0, 30.0, 40.0, 40.0))
    monkeypatch.setattr(module, "time_pass", lambda *_: next(times))
    monkeypatch.setattr(module, "PLAN", PLAN[:2])
    found = measure_costs(target_of(LLAMA))
    assert found.spread > 0.1 and found.lost == 0.0625 and not found.is_steady
    read_or_measure(target_of(LLAMA))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_a_measurement_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(module, "SECONDS", 0.0)
    assert read_or_measure(target_of(LLAMA)).sizes == (1, 8)


@pytest.mark.parametrize("cls", [TargetModel, GraphedTarget])
@pytest.mark.parametrize("context", [6, 16, 63])
def test_costs_are_those_of_sizes_that_fit_a_short_context(
    cls: type[TargetModel], context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ROUNDS", 1)
    options = {"n_embd": 32, "n_layer": 1, "n_head": 2, "max_position_embeddings": context}
    target = cls(Family("short", "GPT2Config", options).build())
    costs = measure_costs(target).costs
    sizes = {size for place, size in PLAN if place == 0 and target.padded_size(size) == size}
    assert costs.sizes == tuple(sorted(size for size in sizes if size <= context))
    drafter = drafter_for("hybrid", target)
    drafter.costs = costs
    prompt = random_ids(context - 5)
    answer = generate(target, drafter, prompt, max_new_tokens=9)
    assert answer.token_ids == referee(target, prompt, 5)
