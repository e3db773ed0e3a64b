"""Batches: every text of a batch is exactly what it is alone, whatever the others do.

Run: pytest tests/model/engine/test_batch.py
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import model.engine.batch
from model.backends.passes.cache import TreeCache
from model.backends.passes.packed import PackedPasses
from model.backends.proofs.packing import batch_of, why_not_packed
from model.backends.target import TargetModel
from model.budget.cost_model import CostModel
from model.budget.paced import BatchBudget
from model.engine.batch import Batch, Event
from model.engine.batch import run as run_batch
from model.engine.budget import DraftBudget
from model.engine.drafter import Drafter
from model.engine.loop import steps_of
from model.engine.rules import SamplingRule, TokenRule
from model.engine.sequence import Request
from model.engine.tree import DraftTree
from model.engine.verification import InvalidLogitsError
from model.kernels.short_pass import short_pass_kernel
from model.methods import METHODS
from model.methods.recycling.drafter import RecyclingDrafter
from tests.model.decoded import drafter_for, random_ids
from tests.model.engine.test_near_ties import model_with_twins
from tests.random_llama import random_llama

VOCAB_SIZE = 64
# Of different lengths; one and two tokens, repetitive ones, and a long one.
PROMPTS = (
    [5],
    [3, 4, 5, 6] * 4,
    random_ids(28, vocab_size=VOCAB_SIZE),
    [9, 9],
    [7, 8, 9] * 15,
    random_ids(50, seed=1, vocab_size=VOCAB_SIZE),
    [1, 2, 3, 4, 5] * 3,
)
LIMITS = (20, 31, 7, 25, 1, 18, 12)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return target_in(torch.float32)


def target_in(dtype: torch.dtype) -> TargetModel:
    """Return a random Llama large enough for the kernels of linear layers."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}
    llama = random_llama(VOCAB_SIZE, seed=3, max_position_embeddings=256, **sizes)
    return TargetModel(llama.to(dtype))


def run(batch: Batch, texts: Sequence[Request], may_fail: bool = False) -> dict[int, Event]:
    """Decode texts as soon as there is room; return the last event of each."""
    found = {event.key: event for event in run_batch(batch, enumerate(texts))}
    errors = [event.error for event in found.values() if event.error]
    assert may_fail or not errors, errors
    return found


def tokens_of(event: Event) -> list[int]:
    return [token for step in event.steps for token in step.tokens]


def texts_of(rules: Callable[[int], TokenRule | None] = lambda index: None) -> list[Request]:
    return [
        Request(prompt, limit, (17,), rules(index))
        for index, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]


def alone(target: TargetModel, texts: Sequence[Request]) -> list[list[int]]:
    """Return the tokens of each text by plain decoding, in a loop of its own."""
    return [
        [
            token
            for step in steps_of(target, drafter_for("vanilla", target), text)
            for token in step.tokens
        ]
        for text in texts
    ]


@pytest.mark.parametrize("method", METHODS)
def test_texts_of_a_batch_are_those_of_the_single_loop(method: str, target: TargetModel) -> None:
    expected = alone(target, texts_of())
    for size in (2, 5):
        events = run(batch_of(target, drafter_for(method, target), size), texts_of())
        assert [tokens_of(events[index]) for index in range(len(PROMPTS))] == expected
        shared = [step.num_sequences for event in events.values() for step in event.steps]
        assert max(shared) == size, "no pass was shared by all"


def test_draws_are_those_of_the_texts_own_generator(target: TargetModel) -> None:
    def drawn(index: int) -> SamplingRule:
        return SamplingRule([], torch.Generator().manual_seed(index))

    expected = alone(target, texts_of(drawn))
    events = run(batch_of(target, drafter_for("recycling", target), 4), texts_of(drawn))
    assert [tokens_of(events[index]) for index in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_pass_has_the_bits_of_each_texts_own(dtype: torch.dtype) -> None:
    if not short_pass_kernel():
        pytest.skip("the kernels cannot be built here")
    target = target_in(dtype)
    assert target.kernel_names["linear"] == "few-rows" and why_not_packed(target) == ""
    parents = [(-1,), (-1, 0, 0, 1, 1, 3), (-1, 0, 1), (-1, 0, 0, 0), (-1,)]
    trees = [
        DraftTree.from_lists(random_ids(len(one), seed, VOCAB_SIZE), one)
        for seed, one in enumerate(parents)
    ]

    def caches() -> Iterator[Any]:
        for prompt, tree in zip(PROMPTS, trees, strict=False):
            cache = target.new_cache(len(prompt) + tree.topology.num_nodes)
            for _ in target.prefill([*prompt, 0], cache, with_logits=False):
                pass
            yield cache

    with torch.inference_mode():
        expected = [
            target.forward(tree, cache) for tree, cache in zip(trees, caches(), strict=True)
        ]
        found = PackedPasses(target).forward(trees, list(caches()))
    assert torch.equal(torch.cat([*found.logits]), torch.cat(expected))


@pytest.mark.parametrize("has_kernel", [False, True])
def test_near_ties_fall_as_in_plain_decoding(has_kernel: bool) -> None:
    if has_kernel and not short_pass_kernel():
        pytest.skip("the kernels cannot be built here")
    plain = model_with_twins(0, stride=2)
    expected = alone(plain, texts_of())
    target = model_with_twins(0, 2, has_kernel)
    events = run(batch_of(target, drafter_for("recycling", target), 4), texts_of())
    assert [tokens_of(events[index]) for index in range(len(PROMPTS))] == expected


def test_an_error_ends_its_own_text_alone(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(SamplingRule):
        def choose(
            self, logits: torch.Tensor, prefix: Sequence[int], tie_margin: float = 0.0
        ) -> int:
            if len(prefix) > len(PROMPTS[1]) + 5:
                raise RuntimeError("a rule of the caller's")
            return int(logits.argmax())

    def stop(text: Sequence[int]) -> bool:
        if len(text) > len(PROMPTS[2]) + 3:
            raise InvalidLogitsError("a criterion of the caller's")
        return False

    def propose(drafter: Drafter, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        if list(context[: len(PROMPTS[3])]) == PROMPTS[3]:
            raise TypeError("a drafter's mistake")
        return recycled(drafter, context, budget)

    texts = texts_of()
    expected = alone(target, texts)
    texts[1] = texts[1]._replace(rule=Failing([]))
    texts[2] = texts[2]._replace(stop=stop)
    recycled = RecyclingDrafter.propose
    monkeypatch.setattr(RecyclingDrafter, "propose", propose)
    batch = batch_of(target, drafter_for("recycling", target), 5)
    caches: weakref.WeakSet[TreeCache] = weakref.WeakSet()

    def new_cache(capacity: int) -> TreeCache:
        caches.add(cache := TargetModel.new_cache(target, capacity))
        return cache

    monkeypatch.setattr(target, "new_cache", new_cache)
    found: dict[int, list[int]] = {index: [] for index in range(len(texts))}
    errors: dict[int, Exception] = {}
    waiting = list(enumerate(texts))
    while waiting or len(batch):
        while waiting and batch.has_capacity:
            batch.add(*waiting.pop(0))
        for event in batch.step():
            if event.error:
                errors[event.key] = event.error
            else:
                found[event.key] = tokens_of(event)
    gc.collect()
    assert not caches, "a kept error keeps the rows of its text"
    for index, kind in ((1, RuntimeError), (2, InvalidLogitsError), (3, TypeError)):
        assert isinstance(errors[index], kind)
        assert found[index] == expected[index][: len(found[index])]
    for index in (0, 4, 5, 6):
        assert found[index] == expected[index]


def test_a_removed_text_makes_room_and_leaves_the_others_alone(target: TargetModel) -> None:
    texts = texts_of()
    expected = alone(target, texts)
    batch = batch_of(target, drafter_for("recycling", target), 2)
    batch.add("gone", texts[1])
    batch.add("stays", texts[0])
    (found,) = (tokens_of(event) for event in batch.step() if event.key == "stays")
    batch.remove("gone")
    assert batch.has_capacity and len(batch) == 1
    batch.add("later", texts[2])
    while len(batch):
        for event in batch.step():
            if event.key == "stays":
                found = tokens_of(event)
            else:
                later = tokens_of(event)
    assert (found, later) == (expected[0], expected[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "at least one"),
        ({"prompt_ids": [1] * 256}, "the model's context"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_what_cannot_be_decoded_is_refused_and_takes_no_place(
    change: dict[str, Any], message: str, target: TargetModel
) -> None:
    batch = batch_of(target, drafter_for("vanilla", target), 2)
    with pytest.raises(ValueError, match=message):
        batch.add(0, texts_of()[0]._replace(**change))
    assert len(batch) == 0


def test_others_go_on_between_the_chunks_of_a_long_prompt(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.engine.batch, "PREFILL_CHUNK", 8)
    monkeypatch.setattr(model.backends.target, "PREFILL_CHUNK", 8)
    monkeypatch.setattr(model.backends.target, "FEWEST_IN_CHUNK", 8)
    texts = texts_of()
    expected = alone(target, texts)
    batch = batch_of(target, drafter_for("recycling", target), 2)
    batch.add("short", texts[0])
    batch.add("long", texts[5])
    steps: list[list[str]] = []
    found: dict[str, list[int]] = {}
    while len(batch):
        events = batch.step()
        steps.append([event.key for event in events])
        for event in events:
            found[event.key] = tokens_of(event)
    assert found == {"short": expected[0], "long": expected[5]}
    assert steps[:6] == [["short"]] * 6, "49 tokens are read in seven chunks of at most 8"


def test_shares_of_time_add_up_to_the_steps(target: TargetModel) -> None:
    """A step's time is counted once, however many texts share it."""
    batch, total, shares = batch_of(target, drafter_for("recycling", target), 3), 0, 0.0
    for key, text in enumerate(texts_of()[:3]):
        batch.add(key, text)
    while len(batch):
        records = [event.record for event in batch.step() if event.record]
        assert len({record.step_ns for record in records}) == 1
        assert all(record.num_sequences == len(records) for record in records)
        total += records[0].step_ns + sum(record.prefill_ns for record in records)
        shares += sum(record.share_ns for record in records)
    assert shares == pytest.approx(total)


def test_texts_of_a_model_that_cannot_be_packed_decode_in_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = TargetModel(random_llama(VOCAB_SIZE, seed=5, rope_scaling=rope))
    assert "depend on the longest text" in why_not_packed(target)
    expected = alone(target, texts_of())
    events = run(batch_of(target, drafter_for("recycling", target), 3), texts_of())
    assert [tokens_of(events[index]) for index in range(len(PROMPTS))] == expected
    assert "texts of a batch are decoded one after another, since " in caplog.text
    assert {step.num_sequences for event in events.values() for step in event.steps} == {1}


class GivenBudget(BatchBudget):
    """A budget whose costs are given, and do not change."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = {}
        self._measured, self._for_sequence = costs, (0.0, 0.0)

    def learn(self, *figures: Any) -> None:
        """Do nothing."""

    def is_paused(self, num_sequences: int) -> bool:
        return False


FLAT = CostModel(
    (1, 2, 4, 8, 16, 32, 64), *[tuple(1 + size / 1000 for size in (1, 2, 4, 8, 16, 32, 64))] * 2
)
STEEP = CostModel((1, 2, 4, 8, 16, 32, 64), *[(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)] * 2)


@pytest.mark.parametrize("method", ["hybrid", "pld"])
def test_one_budget_gives_the_texts_the_nodes_that_pay(method: str, target: TargetModel) -> None:
    expected = alone(target, texts_of())
    sizes = {}
    for name, costs in (("flat", FLAT), ("steep", STEEP)):
        first = drafter_for(method, target, budget="auto")
        events = run(batch_of(target, first, 4, GivenBudget(costs)), texts_of())
        assert [tokens_of(events[index]) for index in range(len(PROMPTS))] == expected
        sizes[name] = [step.num_nodes for event in events.values() for step in event.steps]
    assert max(sizes["flat"]) > 1 and set(sizes["steep"]) == {1}


def test_the_likeliest_nodes_of_all_texts_are_taken() -> None:
    budget = GivenBudget(
        CostModel((1, 2, 3, 4, 5, 6, 8), *[(1.0, 1.0, 1.1, 1.1, 1.2, 4.0, 9.0)] * 2)
    )
    assert budget.share([[0.9, 0.2], [0.8, 0.7, 0.1], []], num_sequences=3, context=100) == [
        1,
        1,
        0,
    ]
    assert budget.share([[0.5, 0.5], [0.5]], num_sequences=2, context=100) == [2, 1]
    assert budget.share([], num_sequences=2, context=100) == []
