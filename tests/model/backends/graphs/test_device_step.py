"""Whole steps on the device accept, keep and learn the same as steps on the host.

Run: pytest tests/model/backends/graphs/test_device_step.py
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from model.backends.graphs.device_step import StaticDeviceStep
from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.target import TargetModel
from model.budget.tree_template import TreeTemplate
from model.engine.budget import DraftBudget
from model.engine.loop import decode, generate
from model.engine.rules import SamplingRule
from model.engine.step import Generation
from model.engine.verification import InvalidLogitsError
from model.methods.recycling.adjacency import AdjacencyMatrix, DeviceTemplate
from model.methods.recycling.drafter import RecyclingDrafter, load_template
from tests.model.decoded import drafter_for, known, random_ids, referee
from tests.model.engine.test_near_ties import VOCAB_SIZE, model_with_twins
from tests.model.families.family import Family

LLAMA = "Llama, grouped heads"
SMALL = Family("small", "LlamaConfig", {"num_hidden_layers": 1})
NUM_NEW = 60


def drafters(target: TargetModel, **options: object) -> tuple[RecyclingDrafter, RecyclingDrafter]:
    """Return a drafter whose steps run whole, and one that works on the host."""
    whole, host = (drafter_for("recycling-averaged", target, **options) for _ in range(2))
    assert isinstance(whole, RecyclingDrafter)
    assert isinstance(host, RecyclingDrafter)
    host.on_device = lambda: None  # type: ignore[method-assign]
    return whole, host


def assert_same(
    target: TargetModel,
    whole: RecyclingDrafter,
    host: RecyclingDrafter,
    prompt: Sequence[int],
    **options: object,
) -> Generation:
    """Decode in both ways, and compare all results and state."""
    answers = []
    for drafter in (whole, host):
        answers.append(generate(target, drafter, prompt, **options))
    one, other = answers
    assert one.token_ids == other.token_ids
    assert [step.path for step in one.steps] == [step.path for step in other.steps]
    assert [step.stop_reason for step in one.steps] == [step.stop_reason for step in other.steps]
    for mine, theirs in zip(one.steps, other.steps, strict=True):
        assert mine.tree.token_ids.tolist() == theirs.tree.token_ids.tolist()
    assert torch.equal(whole.memory()["adjacency"], host.memory()["adjacency"])
    return one


@pytest.fixture
def count_device_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every whole step adds its root."""
    roots: list[int] = []
    run = StaticDeviceStep.run

    def counted(self: StaticDeviceStep, root: int, *arguments: object) -> object:
        roots.append(root)
        return run(self, root, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StaticDeviceStep, "run", counted)
    return roots


@pytest.mark.parametrize("name", [LLAMA, "Qwen2, sliding window", "DeepSeek-V3", "Gemma 3n text"])
def test_drafts_acceptance_and_matrix_are_the_hosts(
    name: str, count_device_steps: list[int]
) -> None:
    target = GraphedTarget(known(name).build())
    whole, host = drafters(target)
    for seed in range(4):
        prompt = random_ids(20, seed)
        answer = assert_same(target, whole, host, prompt, max_new_tokens=NUM_NEW)
        assert answer.token_ids == referee(target, prompt, NUM_NEW)
        assert len(answer.steps) < NUM_NEW, "no draft was accepted: the equality says little"
    assert count_device_steps, "no step ran whole"


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("harvest", [True, False])
def test_the_end_of_the_text_and_the_limit_are_the_hosts(limit: int, harvest: bool) -> None:
    target = GraphedTarget(known(LLAMA).build())
    whole, host = drafters(target, harvest_prompt=harvest)
    prompt = random_ids(20)
    text = referee(target, prompt, NUM_NEW)
    for _ in range(2):  # the second time the matrix knows the answer
        assert_same(target, whole, host, prompt, max_new_tokens=limit)
        for eos_ids in [[text[limit]], [text[3], text[limit + 7]]]:
            options = {"max_new_tokens": NUM_NEW, "eos_ids": eos_ids}
            assert_same(target, whole, host, prompt, **options)


def test_a_template_in_any_order_prefers_what_the_host_prefers() -> None:
    paths = [(1,), (0,), (0, 1), (1, 0), (0, 0), (1, 1), (1, 1, 0), (0, 0, 0), (0, 1, 0)]
    template = TreeTemplate(paths, "shuffled")
    target = GraphedTarget(known(LLAMA).build())
    whole, host = drafters(target)
    whole._template = host._template = template
    for seed in range(4):
        assert_same(target, whole, host, random_ids(20, seed), max_new_tokens=NUM_NEW)


@pytest.mark.parametrize(
    ("stride", "options"), [(2, {}), (8, {}), (2, {"shift": 50.0, "noise": 1e-4})]
)
def test_near_ties_are_left_to_plain_decoding(
    stride: int, options: dict[str, float], count_device_steps: list[int]
) -> None:
    for seed in range(3):
        target = GraphedTarget(model_with_twins(seed, stride, **options).model)
        prompt = random_ids(30, seed, VOCAB_SIZE)
        plain = generate(target, drafter_for("vanilla", target), prompt, max_new_tokens=NUM_NEW)
        whole, host = drafters(target)
        answer = assert_same(target, whole, host, prompt, max_new_tokens=NUM_NEW)
        assert answer.token_ids == plain.token_ids
    assert count_device_steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_logits_in_half_precision_go_to_the_first(dtype: torch.dtype) -> None:
    target = GraphedTarget(model_with_twins(0, 2).model.to(dtype))
    whole, host = drafters(target)
    for seed in range(4):
        prompt = random_ids(30, seed, VOCAB_SIZE)
        assert_same(target, whole, host, prompt, max_new_tokens=NUM_NEW)


def test_steps_that_do_not_fit_run_on_the_host(count_device_steps: list[int]) -> None:
    target = GraphedTarget(known(LLAMA).build())
    whole, host = drafters(target)
    limit = target.context_limit()
    assert limit is not None
    answer = assert_same(target, whole, host, random_ids(limit - 30), max_new_tokens=NUM_NEW)
    assert answer.steps[-1].stop_reason == "context"
    assert len(count_device_steps) < len(answer.steps), "the tree was not cut at the end"
    count_device_steps.clear()
    rule = SamplingRule([], torch.Generator().manual_seed(1))
    generate(target, whole, random_ids(20), max_new_tokens=9, rule=rule)
    generate(target, whole, random_ids(20), max_new_tokens=9, stop=lambda _: False)
    assert not count_device_steps


def test_other_orders_of_writing_and_other_targets_stay_on_the_host() -> None:
    static, plain = GraphedTarget(known(LLAMA).build()), TargetModel(known(LLAMA).build())
    options = {"tie_margin": 0.0, "eos_ids": ()}
    assert (
        static.device_step(drafter_for("recycling-averaged", static).on_device(), **options)
        is not None
    )
    for method, given in [
        ("recycling-averaged", {"policy": "original"}),
        ("recycling-averaged", {"tree_version": "auto"}),
        ("pld", {}),
    ]:
        assert drafter_for(method, static, **given).on_device() is None
    assert (
        plain.device_step(drafter_for("recycling-averaged", plain).on_device(), **options) is None
    )


def test_a_step_is_made_once_for_a_drafter() -> None:
    target = GraphedTarget(known(LLAMA).build())
    one, other = (
        drafter_for("recycling-averaged", target),
        drafter_for("recycling-averaged", target),
    )
    one, other = one.on_device(), other.on_device()
    step = target.device_step(one, 0.0, [3])
    assert target.device_step(other, 0.0, [3]) is not step
    assert target.device_step(one, 0.0, [3]) is step
    assert target.device_step(one, 0.0, [4]) is not step
    assert target.device_step(one, 0.1, [3]) is not step


def test_a_budget_below_the_template_does_not_fit() -> None:
    target = GraphedTarget(known(LLAMA).build())
    step = target.device_step(drafter_for("recycling-averaged", target).on_device(), 0.0, ())
    assert step is not None
    depth = step.topology.max_depth
    assert step.fits(DraftBudget(depth))
    assert not step.fits(DraftBudget(depth - 1))
    assert not step.fits(DraftBudget(depth, chain_only=True))


def test_logits_that_are_no_numbers_are_refused() -> None:
    target = GraphedTarget(known(LLAMA).build())
    drafter = drafter_for("recycling-averaged", target)
    steps = decode(target, drafter, random_ids(20), max_new_tokens=NUM_NEW)
    next(steps)
    with torch.no_grad():
        target.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(InvalidLogitsError):
        list(steps)


@pytest.mark.parametrize("policy", ["average", "accepted-last"])
def test_memory_moves_between_host_and_device(policy: str) -> None:
    target = GraphedTarget(known(LLAMA).build())
    whole, host = drafters(target, policy=policy)
    assert_same(target, whole, host, random_ids(20), max_new_tokens=NUM_NEW)
    fresh, _ = drafters(target, policy=policy)
    fresh.load_memory(whole.memory())
    assert_same(target, fresh, host, random_ids(20, 1), max_new_tokens=NUM_NEW)
    for drafter in (fresh, host):
        drafter.reset()
    assert_same(target, fresh, host, random_ids(20, 2), max_new_tokens=NUM_NEW)


def test_a_device_with_memory_of_its_own_has_the_hosts_rows(count_device_steps: list[int]) -> None:
    target = GraphedTarget(known(LLAMA).build())
    whole, host = drafters(target)
    arrays = [whole._adjacency.successors, whole._adjacency.shares]
    for array in arrays:
        array._is_shared = False
    for seed in range(6):
        options = {"max_new_tokens": NUM_NEW, "stop": None if seed % 3 else lambda _: False}
        assert_same(target, whole, host, random_ids(20, seed), **options)
        if seed == 4:
            whole.load_memory(host.memory())
    assert count_device_steps
    assert all(array.device.data_ptr() != array.host.ctypes.data for array in arrays)
    for drafter in (whole, host):
        drafter.reset()
    assert_same(target, whole, host, random_ids(20, 9), max_new_tokens=NUM_NEW)


def test_a_warm_up_teaches_nothing() -> None:
    target = GraphedTarget(known(LLAMA).build())
    whole, host = drafters(target)
    assert_same(target, whole, host, random_ids(20), max_new_tokens=NUM_NEW)
    target.warm_up(600)
    assert torch.equal(whole.memory()["adjacency"], host.memory()["adjacency"])
    assert_same(target, whole, host, random_ids(20, 1), max_new_tokens=NUM_NEW)


def test_filling_and_writing_by_hand() -> None:
    matrix = AdjacencyMatrix(10, 2, torch.device("cpu"), is_average=False)
    matrix.successors.host[:] = [[(token + 1) % 10, (token + 2) % 10] for token in range(10)]
    template = TreeTemplate([(0,), (1,), (0, 0), (0, 1), (0, 1, 1)], "by hand")
    drafting = DeviceTemplate(matrix, template, torch.device("cpu"))
    drafting.begin_step()
    # root 7: successors 8 and 9; below 8: 9 and 0; below that 0: its second successor 2.
    tokens = drafting.fill(torch.tensor(7))
    assert tokens.tolist() == [7, 8, 9, 9, 0, 2]
    rows = torch.tensor([[1, 1], [2, 2], [3, 3], [4, 4], [5, 5], [6, 6]])
    drafting.learn(
        tokens, rows, torch.zeros(6, 2), torch.tensor([True, True, True, False, False, False])
    )
    # Token 9 stands at nodes 2 and 3: the accepted one wins, though it comes first.
    assert [matrix.successors.host[token].tolist() for token in (7, 8, 9, 0, 2)] == [
        [1, 1],
        [2, 2],
        [3, 3],
        [5, 5],
        [6, 6],
    ]
    assert load_template("2.2.2").topology.max_depth < 10
