"""Batches on a GPU, simulated or real: the CPU's texts, by steps that cost the same for any number of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch import nn

from model.backends.graphs.graphed_target import GraphedTarget, graphed
from model.backends.proofs.packing import batch_of, why_not_packed
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.engine.sequence import Request
from model.methods import drafter_class
from tests.model.decoded import drafter_for, random_ids
from tests.model.engine.test_batch import FLAT, GivenBudget
from tests.model.engine.test_near_ties import VOCAB_SIZE, model_with_twins
from tests.model.families.family import IS_VERSION_4
from tests.simulated_device.demo import (
    END,
    FIRST_TEXT,
    TEXT,
    Costs,
    Setting,
    demo_model,
    demo_target,
    prompt_of,
)
from tests.simulated_device.double.accounts import Accounts
from tests.simulated_device.runs import Runs
from tests.simulated_device.waits import counted_waits

# Of different lengths; with fewer places than texts, some come in where others have ended.
PROMPTS = (FIRST_TEXT, TEXT, "USER: Name a color. ASSISTANT:", "USER: What do cows eat?")
LIMITS = (6, 4, 8, 5)
SIZES = (2, 4)
READ = "synchronize at model/backends/passes/slot_passes.py:_read"
# The most kernels of a step but for those that read a prompt, whatever the number of texts; and those that make the
# inputs of a new shape, or keep the logits of a graph.
KERNELS, NUM_NEW = {"vanilla": 252, "recycling-averaged": 265, "hybrid": 265, "pld": 265}, 2
NUM_GRAPHS = 2  # of a pass, and of what is read of it


class Decoded(NamedTuple):
    """The tokens of each text, and the most that a step costs which reads no prompt and captures nothing."""

    tokens: list[list[int]]
    costs: Costs


def decoded(
    target: TargetModel, setting: Setting, size: int, accounts: Accounts, num_sequences: int = 4
) -> Decoded:
    """Decode the texts in a batch of up to `size` at a time, by drafters that have learned nothing."""
    drafter = drafter_of(target, setting)
    batch = batch_of(target, drafter, size, budget_of(setting), shares_memory=False)
    costs, found = Costs(), [list[int]() for _ in range(num_sequences)]
    waiting = list(range(num_sequences))
    while waiting or len(batch):
        is_joined = False
        while waiting and batch.has_capacity:
            is_joined, index = True, waiting.pop(0)
            request = Request(prompt_of(PROMPTS[index]), LIMITS[index], {END})
            batch.add(index, request)
        num_prepared = target.num_prepared
        accounts.clear()
        for event in batch.step():
            if event.error:
                raise event.error
            assert event.record
            found[event.key] += event.record.tokens
        if not is_joined and target.num_prepared == num_prepared:
            costs.add(accounts)
    return Decoded(found, costs)


def budget_of(setting: Setting) -> GivenBudget | None:
    """Return given costs, under which drafting pays, for methods with an automatic budget."""
    return GivenBudget(FLAT) if setting.method == "hybrid" else None


def drafter_of(target: TargetModel, setting: Setting) -> Any:
    drafter = setting.drafter(target)
    has_models = drafter_class(setting.method).drafts_with() in ("heads", "draft_model")
    return drafter.for_target(target) if has_models else drafter


def alone(target: TargetModel, num_sequences: int = 4) -> list[list[int]]:
    """Return the texts that plain decoding makes one by one."""
    return [
        generate(
            target,
            Setting("vanilla").drafter(target),
            prompt_of(prompt),
            max_new_tokens=limit,
            eos_ids={END},
        ).token_ids
        for prompt, limit in zip(PROMPTS[:num_sequences], LIMITS, strict=False)
    ]


@pytest.fixture(scope="module")
def expected(runs: Runs) -> list[list[int]]:
    """The texts that the CPU decodes one by one."""
    return alone(runs.target_on_cpu())


@pytest.fixture(params=["eager", "graphed"])
def target(request: pytest.FixtureRequest, device_runs: Runs) -> Iterator[TargetModel]:
    """The demo model on a GPU, simulated or real, eager and as graphs."""
    made = device_runs.target_on_gpu(request.param)
    with device_runs.on_device():
        yield made


@pytest.fixture
def on_gpu(device_runs: Runs) -> Iterator[None]:
    """A GPU, simulated or real, for targets of a test's own."""
    with device_runs.on_device():
        yield


@pytest.mark.parametrize("method", KERNELS)
def test_a_step_costs_the_same_for_any_number_of_texts(
    method: str, target: TargetModel, expected: list[list[int]], device_runs: Runs
) -> None:
    setting, is_graphed = Setting(method), isinstance(target, GraphedTarget)
    assert why_not_packed(target) == ""
    with counted_waits(device_runs.gpu) as accounts:
        for size in SIZES:
            for _ in range(2 * is_graphed):  # so that a pass of each shape was captured
                decoded(target, setting, size, accounts)
            num_prepared = target.num_prepared
            found = decoded(target, setting, size, accounts)
            assert found.tokens == expected
            assert target.num_prepared == num_prepared
            assert sum(found.costs.waits.values()) <= 1, found.costs.waits
            if device_runs.gpu is None or IS_VERSION_4:  # a real GPU counts no launches
                continue
            assert found.costs.waits == {READ: 1}
            assert KERNELS[method] <= found.costs.kernels <= KERNELS[method] + NUM_NEW
            assert found.costs.launches == (NUM_GRAPHS if is_graphed else found.costs.kernels)


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_methods_that_read_hidden_states_share_passes(
    method: str, target: TargetModel, expected: list[list[int]]
) -> None:
    found = decoded(target, Setting(method), 2, Accounts(), num_sequences=2)
    assert found.tokens == expected[:2]


@pytest.mark.usefixtures("on_gpu")
def test_near_ties_of_a_batch_are_decided_as_in_the_single_loop() -> None:
    target = graphed(model_with_twins(0, stride=2).model.to("cuda"), say=pytest.fail)
    prompts = [random_ids(size, size, VOCAB_SIZE) for size in (5, 3)]
    options = {"max_new_tokens": 5}
    expected = [
        generate(target, drafter_for("vanilla", target), prompt, **options).token_ids
        for prompt in prompts
    ]
    with mock.patch.object(target, "reference", wraps=target.reference) as reference:
        drafter = drafter_for("recycling-averaged", target)
        batch = batch_of(target, drafter, 2, shares_memory=False)
        found = [list[int]() for _ in prompts]
        for key, prompt in enumerate(prompts):
            batch.add(key, Request(prompt, **options))
        while len(batch):
            for event in batch.step():
                assert event.record, event.error
                found[event.key] += event.record.tokens
    assert found == expected
    assert reference.call_count > 2, "there were no near-ties"


@pytest.mark.usefixtures("on_gpu")
def test_a_longer_text_comes_in_and_graphs_are_captured_anew(expected: list[list[int]]) -> None:
    target = demo_target("graphed", "cuda")
    assert isinstance(target, GraphedTarget)
    drafter = Setting("recycling-averaged").drafter(target)
    batch, found = batch_of(target, drafter, 3, shares_memory=False), dict[int, list[int]]()

    def add(index: int, limit: int) -> None:
        batch.add(index, Request(prompt_of(PROMPTS[index]), limit, {END}))

    add(0, LIMITS[0])
    add(2, LIMITS[2])
    for step in range(20):
        if step == 2:
            add(1, 600)
        for event in batch.step():
            assert event.record, event.error
            found.setdefault(event.key, []).extend(event.record.tokens)
    assert [found[0], found[2]] == [expected[0], expected[2]]
    assert found[1][: LIMITS[1]] == expected[1]


@pytest.mark.usefixtures("on_gpu")
def test_a_model_that_changes_between_texts_is_captured_anew() -> None:
    host = copy.deepcopy(demo_model())
    target = demo_target("graphed", "cuda")
    setting = Setting("pld")
    before = [decoded(target, setting, 2, Accounts()).tokens for _ in range(2)]
    for one in (host, target.model):
        one.lm_head.weight = nn.Parameter(one.lm_head.weight.roll(1, 0), requires_grad=False)
    changed = alone(TargetModel(host, use_kernels=False))
    assert changed != before[0] == before[1]
    for _ in range(2):
        assert decoded(target, setting, 2, Accounts()).tokens == changed
