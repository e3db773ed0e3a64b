"""Siblings: drafters of several texts that are decoded side by side share their memory, and nothing of their texts.

Run: pytest tests/model/methods/test_siblings.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from evaluation.inference.method import LowMemoryDrafter
from model.backends.target import TargetModel
from model.budget.paced import CostAwareDrafter, PacedDrafter
from model.engine.budget import DraftBudget
from model.engine.drafter import Drafter
from model.engine.loop import generate
from model.engine.sequence import Request, RunningSequence
from model.engine.step import Generation, StepRecord, StepTimer
from model.engine.tree import DraftTree
from model.methods import METHODS, drafter_class
from model.methods.sps.drafter import SpsDrafter
from tests.model.decoded import drafter_for, random_ids, referee, target_of

LLAMA = "Llama, grouped heads"
Variant = tuple[str, dict[str, Any]]
VARIANTS: list[Variant] = [
    *((method, {}) for method in METHODS),
    *(
        ("recycling", {"tree_version": "auto", "policy": name})
        for name in ("average", "accepted-last")
    ),
    *(("recycling", {"policy": name}) for name in ("accepted-last", "accepted-only", "original")),
    ("hybrid", {"budget": "fixed", "neighbours": 0}),
    ("lookahead", {"budget": "auto"}),
    ("pld", {"budget": "auto", "match": "latest"}),
    ("samd", {"budget": "auto", "threshold": 2}),
    ("samd", {"budget": "auto", "fallback": "none"}),
    ("suffix", {"shape": "tree", "max_cached_answers": 2}),
    ("suffix", {"max_cached_answers": 0}),
    ("racer", {"ngram": 3, "max_nodes": 50}),
    ("goose", {"start": "hot"}),
    ("cacheback", {"leaders": 9, "followers": 2}),
    ("sps", {"budget": "auto"}),
]
NAMES = ["-".join([method, *map(str, options.values())]) for method, options in VARIANTS]
each_variant = pytest.mark.parametrize(("method", "options"), VARIANTS, ids=NAMES)
# The second and the fourth say the same as the one before.
PROMPTS = [random_ids(17, 1), random_ids(17, 1), random_ids(12, 2) * 2, random_ids(12, 2)]
LENGTH = 12


def fresh(method: str, options: dict[str, Any]) -> Drafter:
    drafter = drafter_for(method, target_of(LLAMA), **options)
    if drafter.needs.probes:
        drafter.for_target(target_of(LLAMA))  # whose embedding it takes
    return drafter


@cache
def expected(place: int) -> list[int]:
    """Return the greedy tokens after a prompt."""
    return referee(target_of(LLAMA), PROMPTS[place], LENGTH)


def concluded(text: RunningSequence, tree: DraftTree) -> StepRecord:
    """Verify a draft, and return the step."""
    logits, hidden = text.forward(tree)
    return text.conclude(tree, logits, hidden, StepTimer())


def proposed(text: RunningSequence) -> Callable[[], DraftTree]:
    """Let a text propose."""
    tree = text.propose()
    return lambda: tree


def half_of_the_offer(text: RunningSequence) -> Callable[[], DraftTree]:
    """Let a text offer nodes, of which it will take half."""
    gains = text.offer(12, 0.0)
    if gains is None:
        return proposed(text)
    return lambda: text.take((1 + len(gains)) // 2)


@torch.inference_mode()
def interleaved(
    drafters: Sequence[Drafter],
    draft: Callable[[RunningSequence], Callable[[], DraftTree]] = proposed,
    on_start: Callable[[Drafter], object] = lambda drafter: None,
) -> list[Generation]:
    """Decode all prompts side by side, each begun two steps after the one before.

    All texts propose or offer before one takes, and all take before one observes.
    """
    target = target_of(LLAMA)
    waiting = list(zip(drafters, PROMPTS, strict=True))
    texts: list[RunningSequence] = []
    found: list[Generation] = []
    num_steps = 0
    while waiting or any(text.stop_reason is None for text in texts):
        if waiting and num_steps % 2 == 0:
            drafter, prompt = waiting.pop(0)
            on_start(drafter)
            request = Request(prompt, LENGTH).checked(target, drafter.needs.overrun)
            texts.append(RunningSequence(target, drafter, request))
            found.append(Generation())
            for _ in texts[-1].read_prompt():
                pass
        going = [place for place, text in enumerate(texts) if text.stop_reason is None]
        drafting = [draft(texts[place]) for place in going]
        drafted = [take() for take in drafting]
        for place, tree in zip(going, drafted, strict=True):
            record = concluded(texts[place], tree)
            text = texts[place]
            if visible := text.request.visible(record, text.num_new):
                found[place].steps.append(visible)
                found[place].token_ids += visible.tokens
        num_steps += 1
    return found


def siblings(drafter: Drafter) -> list[Drafter]:
    """Return a drafter, and siblings for the other prompts."""
    return [drafter, *(drafter.sibling() for _ in PROMPTS[1:])]


def check_texts(found: Sequence[Generation]) -> None:
    assert [each.token_ids for each in found] == [expected(place) for place in range(len(PROMPTS))]


def trees(generation: Generation) -> list[tuple[list[int], tuple[int, ...]]]:
    """Return tokens and parents of all drafts."""
    return [(step.tree.token_ids.tolist(), step.tree.topology.parents) for step in generation.steps]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether memories are equal."""
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


@each_variant
def test_texts_side_by_side_are_those_of_plain_decoding(
    method: str, options: dict[str, Any]
) -> None:
    drafters = siblings(fresh(method, options))
    found = interleaved(drafters)
    check_texts(found)
    num_nodes = [step.num_nodes for each in found for step in each.steps]
    assert max(num_nodes) <= drafters[0].max_nodes
    if method != "vanilla":
        assert max(num_nodes) > 1
    memory = drafters[0].memory()
    if memory and options.get("max_cached_answers") != 0:
        assert any(tensor.any() for tensor in memory.values())
    assert all(same(memory, each.memory()) for each in drafters)


@each_variant
def test_a_sibling_drafts_as_the_drafter_itself_would(method: str, options: dict[str, Any]) -> None:
    """What one has learned the other knows: memory, rates, and all that decides whether to draft."""
    target, used, parent = target_of(LLAMA), fresh(method, options), fresh(method, options)
    early = parent.sibling()
    for drafter in (used, parent):
        generate(target, drafter, PROMPTS[0], max_new_tokens=LENGTH)
    same_again = generate(target, used, PROMPTS[2], max_new_tokens=LENGTH)
    by_sibling = generate(target, early, PROMPTS[2], max_new_tokens=LENGTH)
    assert trees(same_again) == trees(by_sibling)
    third = generate(target, used, PROMPTS[3], max_new_tokens=LENGTH)
    by_late_one = generate(target, parent.sibling(), PROMPTS[3], max_new_tokens=LENGTH)
    assert trees(third) == trees(by_late_one)
    assert same(used.memory(), parent.memory()) and same(used.memory(), early.memory())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((name, {}) for name in ("vanilla", "pld", "lookahead", "logitspec", "rest", "sps")),
        *((name, {}) for name in ("medusa", "hydra", "eagle", "eagle2", "eagle3")),
        ("samd", {"fallback": "none"}),
        ("suffix", {"max_cached_answers": 0}),
    ],
)
def test_without_memory_a_text_is_drafted_as_if_it_were_alone(
    method: str, options: dict[str, Any]
) -> None:
    target, used = target_of(LLAMA), fresh(method, options)
    generate(target, used, PROMPTS[2], max_new_tokens=LENGTH)
    found = interleaved(siblings(used))
    for prompt, each in zip(PROMPTS, found, strict=True):
        alone = generate(target, fresh(method, options), prompt, max_new_tokens=LENGTH)
        assert trees(each) == trees(alone)


@pytest.mark.parametrize(
    ("method", "options"),
    [each for each in VARIANTS if each[0] not in ("racer", "cacheback") and "eagle" not in each[0]],
)
def test_a_draft_is_the_same_after_another_text_began(method: str, options: dict[str, Any]) -> None:
    """Racer moves on at every draft, and cacheback's table has the other prompt by then; others find the same."""
    first = fresh(method, options)
    generate(target_of(LLAMA), first, PROMPTS[2], max_new_tokens=LENGTH)
    second = first.sibling()
    text, other = [1, 2, 3, 4, 5] * 3 + [1, 2], [2, 9, 1, 2, 8, 2, 1] * 2
    budget = DraftBudget(5)
    first.start(text)
    before = first.propose(text, budget)
    second.start(other)
    second.propose(other, budget)
    after = first.propose(text, budget)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.topology is before.topology


@pytest.mark.parametrize(
    ("method", "options"), [each for each in VARIANTS if drafter_class(each[0]).keeps_memory()]
)
def test_memory_is_cleared_and_loaded_for_all_while_texts_are_under_way(
    method: str, options: dict[str, Any]
) -> None:
    drafters = siblings(fresh(method, options))
    taken = drafters[0].memory()
    generate(target_of(LLAMA), drafters[0], PROMPTS[2], max_new_tokens=LENGTH)
    learned = drafters[0].memory()
    drafters[1].reset()
    assert all(same(each.memory(), taken) for each in drafters)
    drafters[2].load_memory(learned)
    assert all(same(each.memory(), learned) for each in drafters)
    check_texts(interleaved(drafters, on_start=lambda drafter: drafter.reset()))
    check_texts(interleaved(drafters, on_start=lambda drafter: drafter.load_memory(learned)))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("hybrid", {}),
        ("recycling", {"tree_version": "auto"}),
        ("pld", {"budget": "auto"}),
        ("samd", {"budget": "auto", "threshold": 2}),
        ("samd", {"budget": "auto", "threshold": 9}),
    ],
)
def test_all_texts_offer_before_one_takes(method: str, options: dict[str, Any]) -> None:
    found = interleaved(siblings(fresh(method, options)), half_of_the_offer)
    check_texts(found)
    accepted = [len(step.path) - 1 for each in found for step in each.steps]
    assert max(accepted) >= 1


def test_a_drafter_for_little_memory_keeps_texts_apart() -> None:
    found = interleaved(siblings(LowMemoryDrafter(fresh("pld", {}))))
    for prompt, each in zip(PROMPTS, found, strict=True):
        drafter = LowMemoryDrafter(fresh("pld", {}))
        alone = generate(target_of(LLAMA), drafter, prompt, max_new_tokens=LENGTH)
        assert trees(each) == trees(alone)


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle", "eagle2", "eagle3"])
def test_heads_are_loaded_once_whichever_sibling_is_the_first(method: str) -> None:
    target = target_of(LLAMA)
    config = fresh(method, {}).config
    first = drafter_class(method)(config, target.vocab_size, target.device)
    second = first.sibling()
    for drafter in (second, first, first.sibling()):
        drafter.for_target(target)
    networks = {id(weights_of(each)) for each in (first, second, second.sibling())}
    assert len(networks) == 1


def weights_of(drafter: Any) -> Any:
    """Return the heads or the draft network of a drafter."""
    return drafter._heads if hasattr(drafter, "_heads") else drafter._text.network


def test_a_draft_model_is_wrapped_once_for_another_kind_of_passes() -> None:
    class Other(TargetModel):
        pass

    target, first = target_of(LLAMA), fresh("sps", {})
    assert isinstance(first, SpsDrafter)
    second, other = first.sibling(), Other(target.model)
    assert second._model is first._model and second._cache is not first._cache
    other.like = Other  # type: ignore[assignment, method-assign]
    for drafter in (first, second):
        drafter.for_target(other)
    assert isinstance(first._model, Other) and first._model is second._model
    assert first._cache is not second._cache


def test_costs_are_learned_by_all() -> None:
    first = fresh("pld", {"budget": "auto"})
    assert isinstance(first, CostAwareDrafter)
    second = first.sibling()
    assert second.costs is None
    paced = first.for_target(target_of(LLAMA))
    assert second.costs is first.costs is not None
    third = paced.sibling()
    assert isinstance(third, PacedDrafter)
    assert third._costs is first.costs and third._drafter is not first


def test_an_answer_in_progress_is_copied_from() -> None:
    first = fresh("suffix", {})
    second = first.sibling()
    first.start([1, 2, 3])
    second.start([4, 5, 6])
    first.skip([10, 11, 12, 13])
    second.skip([10, 11])
    assert second.propose([4, 5, 6, 10, 11], DraftBudget(9)).token_ids.tolist() == [11, 12, 13]
    first.skip([14])
    second.skip([12, 13])
    context = [4, 5, 6, 10, 11, 12, 13]
    assert second.propose(context, DraftBudget(9)).token_ids.tolist() == [13, 14]
    assert same(first.memory(), second.memory())
    assert first.memory()["lengths"].tolist() == [5, 4]


def test_tokens_that_all_texts_emit_are_the_frequent_ones_of_each() -> None:
    first = fresh("hybrid", {"budget": "fixed", "num_nodes": 2})
    second = first.sibling()
    first.start([1])
    second.start([2])
    first.skip([30, 31, 30])
    second.skip([33])
    third = second.sibling()
    third.start([3])
    assert third.propose([3], DraftBudget(1)).token_ids.tolist() == [3, 30, 33]
    first.reset()
    assert third.propose([3], DraftBudget(1)).token_ids.tolist() == [3]
