"""Slots: the layout of batches on a GPU, here on the CPU: each text as in a pass of its own.

Run: pytest tests/model/backends/passes/test_slots.py
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from model.backends.passes.cache import TreeCache
from model.backends.passes.slot_passes import SlotPasses
from model.backends.passes.slots import SLOT_STEP
from model.backends.proofs.packing import batch_of
from model.backends.target import TargetModel
from model.engine.tree import DraftTree
from tests.model.decoded import drafter_for, random_ids
from tests.model.engine.test_batch import PROMPTS, VOCAB_SIZE, alone, run, texts_of, tokens_of
from tests.random_llama import random_llama

PARENTS = ((-1,), (-1, 0, 0, 1, 1, 3), (-1, 0, 1))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(random_llama(VOCAB_SIZE, seed=3, num_key_value_heads=2), use_kernels=False)


@pytest.fixture
def in_slots(monkeypatch: pytest.MonkeyPatch) -> list[SlotPasses]:
    """Batches on the CPU in the layout of a GPU; the passes of each."""
    made: list[SlotPasses] = []

    def shared_passes(target: TargetModel, size: int) -> SlotPasses:
        made.append(SlotPasses(target, size))
        return made[-1]

    monkeypatch.setattr("model.backends.proofs.packing.shared_passes", shared_passes)
    return made


def read(target: TargetModel, prompt: Sequence[int], cache: TreeCache) -> TreeCache:
    for _ in target.prefill([*prompt, 0], cache, with_logits=False):
        pass
    return cache


def trees() -> list[DraftTree]:
    """Return a tree for each of the first texts."""
    return [
        DraftTree.from_lists(random_ids(len(one), seed, VOCAB_SIZE), one)
        for seed, one in enumerate(PARENTS)
    ]


@torch.inference_mode()
def test_each_text_has_the_logits_of_its_own_pass(target: TargetModel) -> None:
    passes = SlotPasses(target, 4)
    own = [read(target, prompt, target.new_cache(99)) for prompt in PROMPTS[:3]]
    caches = [read(target, prompt, passes.new_cache(99)) for prompt in PROMPTS[:3]]
    for path in ([0], [0, 2]):  # the second time after rows were moved
        done = passes.forward(trees(), caches)
        reads = done.read(3, True)
        for cache, other, tree, logits, found in zip(
            own, caches, trees(), done.logits, reads, strict=True
        ):
            base = cache.length
            expected = target.forward(tree, cache)
            torch.testing.assert_close(logits, expected)
            assert found.candidates.token_ids == expected.topk(3).indices.tolist()
            assert found.node_tokens == tree.token_ids.tolist()
            kept = [node for node in path if node < tree.topology.num_nodes]
            for one in (cache, other):
                one.keep(base, kept)


def test_a_batch_in_slots_is_the_single_loop(
    target: TargetModel, in_slots: list[SlotPasses]
) -> None:
    expected = alone(target, texts_of())
    for method in ("recycling", "pld", "hybrid"):
        for size in (2, 5):
            events = run(batch_of(target, drafter_for(method, target), size), texts_of())
            assert [tokens_of(events[index]) for index in range(len(PROMPTS))] == expected
    assert in_slots


@torch.inference_mode()
def test_slots_grow_with_their_texts_under_way(target: TargetModel) -> None:
    """Rows that wait to be moved, and those of a prompt that is not yet read, come along."""
    passes = SlotPasses(target, 3)
    short, other = (read(target, PROMPTS[1], passes.new_cache(60)) for _ in range(2))
    tree = DraftTree.from_lists([3, 4, 5, 6], (-1, 0, 0, 2))
    passes.forward([tree, tree], [short, other])
    for cache in (short, other):
        cache.keep(len(PROMPTS[1]), [0, 2, 3])
    expected = passes.forward([tree], [other]).logits[0].clone()
    long = passes.new_cache(SLOT_STEP)
    assert passes.slots.num_rows == 2 * SLOT_STEP
    read(target, PROMPTS[2], long)
    torch.testing.assert_close(passes.forward([tree, tree], [short, long]).logits[0], expected)


@torch.inference_mode()
def test_padding_beyond_a_slot_is_no_row_of_a_text(target: TargetModel) -> None:
    """A text at the end of its slot beside one with a large draft."""
    passes = SlotPasses(target, 2)
    full, other = passes.new_cache(SLOT_STEP - 1), passes.new_cache(200)
    assert passes.slots.num_rows == SLOT_STEP
    read(target, random_ids(SLOT_STEP - 3, vocab_size=VOCAB_SIZE), full)
    read(target, PROMPTS[0], other)
    own = target.new_cache(SLOT_STEP)
    read(target, random_ids(SLOT_STEP - 3, vocab_size=VOCAB_SIZE), own)
    root, star = DraftTree.chain([3]), DraftTree.star([4] * 30)
    for _ in range(2):
        found = passes.forward([root, star], [full, other]).logits[0]
        torch.testing.assert_close(found, target.forward(root, own))
        other.keep(len(PROMPTS[0]), ())
    assert full.length == full.capacity == SLOT_STEP - 1


@torch.inference_mode()
def test_broken_numbers_stay_in_their_slot(target: TargetModel) -> None:
    passes = SlotPasses(target, 3)
    fine, broken = (read(target, PROMPTS[1], passes.new_cache(60)) for _ in range(2))
    root = DraftTree.chain([3])
    expected = passes.forward([root], [fine]).logits[0].clone()
    fine.keep(len(PROMPTS[1]), ())
    for buffer in broken.storage.buffers:
        buffer.fill_(float("nan"))
    logits = passes.forward([root, root], [fine, broken]).logits
    torch.testing.assert_close(logits[0], expected)
    assert logits[1].isnan().all()
    passes.release(broken)
    again = read(target, PROMPTS[1], passes.new_cache(60))
    assert again.index == broken.index
    torch.testing.assert_close(passes.forward([root], [again]).logits[0], expected)


@torch.inference_mode()
def test_the_first_rows_of_a_text_come_with_it(target: TargetModel) -> None:
    passes, root = SlotPasses(target, 2), DraftTree.chain([3])
    own = read(target, PROMPTS[1], target.new_cache(60))
    cache = passes.new_cache(60, own)
    assert cache.length == own.length
    found = passes.forward([root], [cache]).logits[0]
    torch.testing.assert_close(found, target.forward(root, own))


@torch.inference_mode()
def test_hidden_states_are_those_of_all_nodes(target: TargetModel) -> None:
    states, passes = target.hidden_states((-1, 1)), SlotPasses(target, 3)
    own = [read(target, prompt, target.new_cache(99)) for prompt in PROMPTS[:3]]
    caches = [read(target, prompt, passes.new_cache(99)) for prompt in PROMPTS[:3]]
    num_nodes = sum(len(one) for one in PARENTS)
    with states.captured():
        passes.forward(trees(), caches)
        found, expected = states.take(num_nodes), []
        for tree, cache in zip(trees(), own, strict=True):
            target.forward(tree, cache)
            expected.append(states.take(tree.topology.num_nodes))
    torch.testing.assert_close(found, torch.cat(expected))
