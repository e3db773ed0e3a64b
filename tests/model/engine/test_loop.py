"""The loop: exact lengths, ends and limits for every method.

Run: pytest tests/model/engine/test_loop.py
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.target import TargetModel
from model.budget.cost_model import FIRST_BALANCE, CostModel
from model.engine.budget import DraftBudget
from model.engine.drafter import Drafter
from model.engine.loop import decode, generate
from model.engine.tree import DraftTree
from model.methods import METHODS, drafter_class
from model.methods.sps.drafter import SpsDrafter
from tests.model.decoded import drafter_for, known, random_ids, referee, target_of
from tests.model.families.family import VOCAB, Family
from tests.pairs import pairs

PROMPT = random_ids(14, seed=3)
LLAMA = "Llama, grouped heads"


class Oracle(Drafter):
    """Drafts a given continuation, so that every draft is accepted."""

    def __init__(self, target: TargetModel, continuation: list[int], depth: int = 6) -> None:
        super().__init__(None, target.vocab_size, target.device)
        self.max_nodes = 1 + depth
        self.text: list[int] = continuation
        self.depth = depth
        self.prompt_length = 0

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Note where the answer begins."""
        self.prompt_length = len(prompt_ids)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return the continuation as a chain."""
        begin = len(context) - self.prompt_length
        depth = min(self.depth, budget.max_depth)
        return DraftTree.chain([context[-1], *self.text[begin : begin + depth]])


@pytest.mark.parametrize(("method", "limit"), pairs(METHODS, [1, 2, 5, 23], each=2))
def test_exactly_max_new_tokens_come_and_lengths_sum_to_them(method: str, limit: int) -> None:
    target = target_of(LLAMA)
    answer = generate(target, drafter_for(method, target), PROMPT, max_new_tokens=limit)
    assert answer.token_ids == referee(target, PROMPT, limit)
    assert sum(answer.accept_lengths) == len(answer.token_ids) == limit
    assert min(answer.accept_lengths) >= 1
    reasons = [step.stop_reason for step in answer.steps]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]


@pytest.mark.parametrize("limit", range(1, 16))
def test_a_limit_inside_an_accepted_run_cuts_it(limit: int) -> None:
    target = target_of(LLAMA)
    continuation = referee(target, PROMPT, 30)
    answer = generate(target, Oracle(target, continuation), PROMPT, max_new_tokens=limit)
    assert answer.token_ids == continuation[:limit]
    full, rest = divmod(limit, 7)
    assert answer.accept_lengths == [7] * full + ([rest] if rest else [])


@pytest.mark.parametrize("index", range(15))
def test_the_end_token_ends_the_text_inside_an_accepted_run(index: int) -> None:
    target = target_of(LLAMA)
    continuation = referee(target, PROMPT, 30)
    eos_id = continuation[index]
    expected = continuation[: continuation.index(eos_id) + 1]
    oracle = Oracle(target, continuation)
    answer = generate(target, oracle, PROMPT, max_new_tokens=30, eos_ids=[eos_id, 10**6])
    assert answer.token_ids == expected
    assert answer.steps[-1].stop_reason == "eos"
    assert sum(answer.accept_lengths) == len(expected)


@pytest.mark.parametrize("method", METHODS)
def test_an_end_token_in_the_prompt_is_no_end(method: str) -> None:
    target = target_of(LLAMA)
    continuation = referee(target, PROMPT, 12)
    unused = next(token for token in PROMPT if token not in continuation)
    drafter = drafter_for(method, target)
    answer = generate(target, drafter, PROMPT, max_new_tokens=12, eos_ids=[unused])
    assert answer.token_ids == continuation


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_of_one_token_works(method: str) -> None:
    target = target_of(LLAMA)
    answer = generate(target, drafter_for(method, target), [9], max_new_tokens=25)
    assert answer.token_ids == referee(target, [9], 25)


MORE_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "recycling": [{"tree_version": "auto"}, {"policy": "accepted-last"}, {"policy": "original"}],
    "samd": [{"threshold": 1}, {"budget": "auto"}],
}


@pytest.mark.parametrize("kind", [TargetModel, GraphedTarget])
@pytest.mark.parametrize("prompt", [[VOCAB], [5, 9, VOCAB], [VOCAB, 5, VOCAB, 5, 9, VOCAB, 5]])
def test_a_prompt_may_hold_tokens_that_have_no_logit(
    prompt: list[int], kind: type[TargetModel]
) -> None:
    model = known(LLAMA).build()
    # Such as image tokens in Llama 3.2 Vision: a model reads them and never emits one.
    model.set_input_embeddings(torch.nn.Embedding(VOCAB + 8, model.config.hidden_size))
    target = kind(model)
    expected = referee(target, prompt, 12)
    for method in METHODS:
        for options in ({}, *MORE_OPTIONS.get(method, ())):
            drafter = drafter_for(method, target, **options)
            for _ in range(2):  # the second time with the first one's state
                answer = generate(target, drafter, prompt, max_new_tokens=12)
                assert answer.token_ids == expected, (method, options)


@lru_cache
def short_target() -> TargetModel:
    """Return a target with learned positions for 48 tokens."""
    options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
    return TargetModel(
        Family("short", "GPT2Config", options, without=("max_position_embeddings",)).build()
    )


@pytest.mark.parametrize(("method", "length"), pairs(METHODS, [1, 20, 46, 47], each=2))
def test_learned_positions_are_never_passed(method: str, length: int) -> None:
    target = short_target()
    prompt = random_ids(length, seed=5)
    answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=100)
    assert answer.token_ids == referee(target, prompt, 48 - length)
    assert answer.steps[-1].stop_reason == "context"


@pytest.mark.parametrize("method", METHODS)
def test_a_limit_that_is_also_the_context_counts_as_the_limit(method: str) -> None:
    options = {"max_position_embeddings": 32}
    target = TargetModel(Family("short", "OPTConfig", {**options, "ffn_dim": 48}).build())
    answer = generate(target, drafter_for(method, target), random_ids(20), max_new_tokens=12)
    assert len(answer.token_ids) == 12
    assert answer.steps[-1].stop_reason == "length"


def test_requests_that_cannot_be_answered_are_errors() -> None:
    target = TargetModel(Family("short", "LlamaConfig", {"max_position_embeddings": 16}).build())
    vanilla = drafter_for("vanilla", target)
    with pytest.raises(ValueError, match="max_new_tokens: got 0; allowed: integers of 1 or more"):
        generate(target, vanilla, [1], max_new_tokens=0)
    with pytest.raises(ValueError, match="prompt: got no token"):
        generate(target, vanilla, [], max_new_tokens=1)
    with pytest.raises(ValueError, match="got 16 tokens; allowed: fewer than the model's context"):
        generate(target, vanilla, [1] * 16, max_new_tokens=1)


class Fork(Drafter):
    """Drafts two siblings whatever the budget says: a drafter with a bug."""

    max_nodes = 3

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return the siblings."""
        return DraftTree.from_lists([context[-1], 2, 3], (-1, 0, 0))


def test_a_drafter_that_exceeds_its_budget_is_stopped() -> None:
    target = TargetModel(Family("bloom", "BloomConfig", {"n_head": 4, "n_layer": 2}).build())
    fork = Fork(None, target.vocab_size, target.device)
    with pytest.raises(ValueError, match="draft branches"):
        generate(target, fork, [1], max_new_tokens=3)


def test_steps_record_their_nodes_and_their_time() -> None:
    target = target_of(LLAMA)
    steps = list(decode(target, drafter_for("recycling", target), PROMPT, max_new_tokens=10))
    assert all(step.num_nodes == 81 for step in steps)
    assert steps[0].prefill_ns > 0 and not any(step.prefill_ns for step in steps[1:])
    for step in steps:
        parts = (step.draft_ns, step.forward_ns, step.verify_ns, step.keep_ns, step.observe_ns)
        assert min(parts) >= 0 and step.forward_ns > 0


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("head_share", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("method", ["recycling", "hybrid"])
def test_a_prompt_is_harvested_when_asked_or_where_the_head_is_cheap(
    method: str, head_share: float, asked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(LLAMA)
    monkeypatch.setitem(vars(target), "head_share", head_share)
    cls = drafter_class(method)
    config = cls.config_class(harvest_prompt=asked, **cls.auto_options)
    drafter = cls(config, target.vocab_size, target.device)
    seen: list[int] = []
    monkeypatch.setattr(drafter, "observe_prompt", lambda ids, _: seen.extend(ids))
    generate(target, drafter, random_ids(9), max_new_tokens=2)
    is_harvested = asked if asked is not None else head_share < drafter.needs.cheap_head
    assert len(seen) == (8 if is_harvested else 0)


class EveryOtherRests(CostModel):
    """Costs under which every other step is root-only."""

    def learn(self, num_nodes: int, num_tokens: int, context: int, nanoseconds: int) -> None:
        """Rest after every step that was no rest."""
        if self.switch.is_paused:
            while self.switch.is_paused:
                self.switch.pause()
        else:
            self.switch.learn(-2 * FIRST_BALANCE)


@pytest.mark.parametrize("method", [name for name in METHODS if drafter_class(name).auto_options])
def test_rests_change_no_token_and_what_follows_knows_the_text(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel(target_of(LLAMA).model)

    def flat_costs(model: TargetModel) -> CostModel:
        flat = (1.0 if model is target else 0.01,) * 3  # a draft model is cheap
        return EveryOtherRests((1, 8, 64), flat, flat)

    monkeypatch.setattr("model.budget.measure.read_or_measure", flat_costs)
    options = drafter_class(method).auto_options
    drafter = drafter_for(method, target, **options)
    if isinstance(drafter, SpsDrafter):  # other tests share its draft model, and what they measured
        monkeypatch.setattr(drafter._model, "measured", {})
    prompt = random_ids(30, seed=3)
    for _ in range(2):  # the second time from memory
        generation = generate(target, drafter, prompt, max_new_tokens=60)
        assert generation.token_ids == referee(target, prompt, 60)
        counts = [step.num_nodes for step in generation.steps]
        assert all(min(pair) == 1 for pair in pairwise(counts))
    assert max(counts) > 1


def test_what_one_drafter_loses_makes_no_other_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = (1.0, 1.0, 1.0)
    monkeypatch.setattr(
        "model.budget.measure.read_or_measure", lambda _: CostModel((1, 8, 64), flat, flat)
    )
    target = TargetModel(target_of(LLAMA).model)
    one, other = (drafter_for("hybrid", target) for _ in range(2))
    for drafter in (one, other):
        generate(target, drafter, PROMPT, max_new_tokens=2)
    assert one.costs is not None and other.costs is not None
    one.costs.switch.learn(-2 * FIRST_BALANCE)
    num_left = other.costs.switch._num_left
    generate(target, one, PROMPT, max_new_tokens=4)
    assert other.costs.switch._num_left == num_left
