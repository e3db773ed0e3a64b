"""The guesses in C++ and in Python agree: equal trees, equal memory, after any steps.

Run: pytest tests/model/methods/recycling/test_auto_tree_reference.py
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import cpp_extension

from model.engine.budget import CostCurve, DraftBudget
from model.engine.verification import verify
from model.methods.recycling.auto_tree import AutoTree, library_of_guesses
from model.methods.recycling.drafter import RecyclingConfig
from tests.model.methods.recycling.reference_auto_tree import ReferenceRowGuesses

CPU = torch.device("cpu")
SIZES = (1, 2, 4, 6, 8, 12, 24)
VOCAB = 67


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("is_average", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_both_draft_and_learn_the_same(seed: int, is_average: bool, k: int) -> None:
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    matrices = [np.zeros((VOCAB, k), dtype=np.int32) for _ in range(2)]
    both = ReferenceRowGuesses(matrices[0], is_average), AutoTree(matrices[1], is_average)
    for step in range(80):
        if step % 20 == 0:  # a prompt
            tokens = [source.randrange(VOCAB) for _ in range(30)]
            values, ids = (3 * torch.randn(30, VOCAB, generator=generator)).topk(k)
            prompt = [*tokens, VOCAB, source.randrange(VOCAB)]  # VOCAB: a token without a logit
            for guesses in both:
                guesses.start(prompt)
                guesses.write(tokens, ids.tolist(), values.tolist())
        costs = sorted(1.0 + source.random() * size / 8 for size in SIZES)
        depth, chain_only = source.choice((0, 1, 3, 24)), source.random() < 0.2
        budget = DraftBudget(depth, chain_only, CostCurve(SIZES, tuple(costs)))
        root = source.randrange(VOCAB)
        if source.random() < 0.3:
            limits = source.choice((0, 3, 12)), budget, source.choice((0.0, 0.1))
            gains = [list(guesses.offer(root, *limits)) for guesses in both]
            assert gains[0] == gains[1]
            count = source.randint(0, len(gains[0]))
            trees = [guesses.take(count) for guesses in both]
        else:
            trees = [guesses.grow(root, 63, budget) for guesses in both]
        assert trees[0].token_ids.tolist() == trees[1].token_ids.tolist()
        assert trees[0].topology is trees[1].topology
        num_nodes = trees[0].topology.num_nodes
        logits = 3 * torch.randn(num_nodes, VOCAB, generator=generator)
        for child in range(1, num_nodes):
            if source.random() < 0.6:
                logits[trees[0].topology.parents[child], trees[0].token_ids[child]] = 15.0
        acceptance = verify(trees[0], logits, num_candidates=k, tie_margin=1e-9)
        order = acceptance.accepted_last(trees[0].topology)
        for guesses in both:
            for _ in range(1 + (step % 3 == 0)):  # the second time as another drafter's tree
                guesses.learn(acceptance, order)
        if step % 7 == 0:  # decoded plainly
            plain = [source.randrange(VOCAB) for _ in range(3)]
            for guesses in both:
                guesses.append(plain)
        memories = [guesses.memory() for guesses in both]
        for name, tensor in memories[0].items():
            assert torch.equal(tensor, memories[1][name]), name
        assert np.array_equal(*matrices)
        if step == 50:
            for guesses in both:
                guesses.reset()
            assert torch.equal(both[0].memory()["rates"], both[1].memory()["rates"])
            for guesses in both:
                guesses.load_memory(memories[0])


@pytest.mark.parametrize("seed", range(3))
def test_guesses_for_several_texts_draft_and_learn_the_same(seed: int) -> None:
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    matrices = [np.zeros((VOCAB, 4), dtype=np.int32) for _ in range(2)]
    slow, fast = ReferenceRowGuesses(matrices[0], True), AutoTree(matrices[1], True)
    texts = [(slow, fast), (slow.sibling(), fast.sibling())]
    for both in texts:
        prompt = source.choices(range(VOCAB), k=20)
        for guesses in both:
            guesses.start(prompt)
    costs = CostCurve(SIZES, tuple(1.0 + size / 4000 for size in SIZES))
    sizes = []
    for _ in range(40):
        root = source.randrange(VOCAB)
        grown = []
        for both in texts:  # each grows before one learns
            trees = [guesses.grow(root, 63, DraftBudget(9, cost_curve=costs)) for guesses in both]
            assert trees[0].token_ids.tolist() == trees[1].token_ids.tolist()
            grown.append(trees[1])
        for both, tree in zip(texts, grown, strict=True):
            sizes.append(tree.topology.num_nodes)
            logits = 3 * torch.randn(sizes[-1], VOCAB, generator=generator)
            for child in range(1, sizes[-1], 2):
                logits[tree.topology.parents[child], tree.token_ids[child]] = 15.0
            acceptance = verify(tree, logits, num_candidates=4)
            for guesses in both:
                guesses.learn(acceptance, acceptance.accepted_last(tree.topology))
        memories = [guesses.memory() for guesses in texts[0] + texts[1]]
        assert all(
            torch.equal(tensor, memory[name])
            for memory in memories
            for name, tensor in memories[0].items()
        )
        assert np.array_equal(*matrices)
    assert max(sizes) > 4


def test_a_token_without_a_row_is_refused() -> None:
    guesses = AutoTree(np.zeros((9, 2), dtype=np.int32), True)
    with pytest.raises(IndexError, match="got token 9; allowed: 0 to 8"):
        guesses.grow(9, 63, DraftBudget(3, cost_curve=CostCurve((1, 2), (1.0, 1.1))))
    with pytest.raises(IndexError, match="got token 9; allowed: 0 to 8"):
        guesses.write([3, 9], [[1, 2]] * 2, [[0.0, -1.0]] * 2)


def test_without_a_compiler_it_is_refused_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    library_of_guesses.cache_clear()
    with pytest.raises(
        ValueError, match="no C\\+\\+ compiler: got no-such-compiler; install g\\+\\+"
    ):
        RecyclingConfig(tree_version="auto")
    assert RecyclingConfig().policy == "original", "a static tree needs none"
