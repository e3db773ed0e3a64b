"""The candidate pools in C++ and in Python agree: equal trees, equal memory, after any text.

Run: pytest tests/model/methods/hybrid/test_candidate_pool.py
"""

from __future__ import annotations

import random
from copy import copy
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from model.budget.best_first import ANY_TOKEN, Guesses
from model.engine.budget import CostCurve, DraftBudget
from model.engine.read_out import logit_samples_of
from model.engine.tree import DraftTree
from model.engine.verification import Acceptance, verify
from model.methods.hybrid import candidate_pool, tables
from model.methods.hybrid.candidate_pool import CandidatePool
from model.methods.hybrid.drafter import HybridConfig
from tests.model.methods.hybrid.reference_candidate_pool import ReferencePool

CPU = torch.device("cpu")
SIZES = (1, 2, 4, 6, 8, 12, 24)


class Pair:
    """Both candidate pools with the same input; their outputs are compared."""

    def __init__(self, seed: int, k: int, vocab_size: int, num_slots: int) -> None:
        self.source = random.Random(seed)
        self.k, self.vocab_size = k, vocab_size
        self.num_neighbours = self.source.choice((0, 1, 4, 32))
        self.has_guide = seed % 2 == 1
        sizes = (num_slots, k, vocab_size, self.num_neighbours)
        self.pools = [kind(*sizes) for kind in (ReferencePool, CandidatePool)]

    def sibling(self) -> Pair:
        """Return both pools for another text, with the same memory."""
        reference, pool = self.pools
        assert isinstance(pool, CandidatePool)
        other = copy(self)
        other.pools = [copy(reference), pool.sibling()]
        return other

    def tokens(self, count: int) -> list[int]:
        """Return random tokens: some often, so that n-grams repeat."""
        draw = self.source.random
        return [int(self.vocab_size * draw() ** 3) for _ in range(count)]

    def cost_curve(self) -> CostCurve | None:
        """Return random costs, rising, or none."""
        if self.source.random() < 0.3:
            return None
        costs = sorted(1.0 + self.source.random() * size / 8 for size in SIZES)
        return CostCurve(SIZES, tuple(costs))

    def verified(self, tree: DraftTree) -> Acceptance:
        """Return the acceptance of a model with random logits, which mostly follow the tree."""
        num_nodes = tree.topology.num_nodes
        logits = torch.randn(
            num_nodes,
            self.vocab_size,
            generator=torch.Generator().manual_seed(self.source.getrandbits(30)),
        )
        for child in range(1, num_nodes):
            if self.source.random() < 0.6:
                logits[tree.topology.parents[child], tree.token_ids[child]] = 6.0
        limit = self.source.choice((None, 1, 2))  # a path may be longer than what is emitted
        # As decoding asks where near-ties are decided: for two candidates at least.
        options = {"num_candidates": max(self.k, 2), "with_samples": self.num_neighbours > 0}
        return verify(tree, logits, max_tokens=limit, **options)

    def start(self) -> None:
        """Begin a text in both, with rows of a part of it."""
        prompt = self.tokens(self.source.choice((1, 2, 5, 300)))
        begin = self.source.randrange(len(prompt))
        logits = torch.randn(len(prompt) - begin, self.vocab_size)
        values, ids = logits.topk(self.k)
        logit_samples = (
            logit_samples_of(logits) if self.num_neighbours and self.source.random() < 0.5 else None
        )
        for pool in self.pools:
            pool.start(prompt)
            pool.write_rows(prompt, begin, ids.tolist(), values.tolist(), logit_samples)

    def guesses(self, root: int) -> Guesses:
        """Return a guide's tree with random rows."""
        draw, count = self.source.randint, self.source.choice((1, 4, 20))
        tokens = [root, *(self.source.choice((ANY_TOKEN, draw(0, 5))) for _ in range(count - 1))]
        parents = [-1, *(draw(0, node) for node in range(count - 1))]
        width = min(3, self.vocab_size)
        rows = [self.source.sample(range(self.vocab_size), width) for _ in range(count)]
        values = [[-3 * self.source.random() for _ in row] for row in rows]
        return Guesses(tokens, parents, rows, values)

    def step(self) -> None:
        """Draft in both, and teach both."""
        root = self.tokens(1)[0]
        if self.has_guide and self.source.random() < 0.8:
            guesses = self.guesses(root)
            for pool in self.pools:
                pool.guide(guesses)
        num_nodes = self.source.choice((1, 3, 7, 30))
        max_depth, chain_only = self.source.choice((0, 1, 3, 24)), self.source.random() < 0.2
        budget = DraftBudget(max_depth, chain_only, self.cost_curve())
        if self.source.random() < 0.3:
            least = self.source.choice((0.0, 0.1))
            gains = [[*pool.offer(root, num_nodes, budget, least)] for pool in self.pools]
            assert gains[0] == gains[1]
            count = self.source.randint(0, len(gains[0]))
            trees = [pool.take(count) for pool in self.pools]
        else:
            trees = [pool.grow(root, num_nodes, budget) for pool in self.pools]
        assert trees[0].token_ids.tolist() == trees[1].token_ids.tolist()
        assert trees[0].topology is trees[1].topology
        assert trees[0].sources == trees[1].sources
        acceptance = self.verified(trees[0])
        for pool, tree in zip(self.pools, trees, strict=True):
            pool.learn(tree, acceptance)

    def compare(self) -> dict[str, torch.Tensor]:
        """Compare the memories, and return them."""
        memories = [pool.memory() for pool in self.pools]
        assert set(memories[0]) == set(memories[1])
        for name, tensor in memories[0].items():
            assert torch.equal(tensor, memories[1][name]), name
        return {name: tensor.clone() for name, tensor in memories[0].items()}


@pytest.mark.parametrize(
    ("k", "vocab_size", "num_slots"), [(8, 67, 256), (2, 20, 2**12), (30, 500, 2**10), (1, 3, 256)]
)
@pytest.mark.parametrize("seed", range(5))
def test_both_pools_draft_and_learn_the_same(
    seed: int, k: int, vocab_size: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # a ring that goes round
        monkeypatch.setattr(tables, "NUM_RECORDS", 50)
    pair = Pair(seed, k, vocab_size, num_slots)
    for text in range(4):
        pair.start()
        for _ in range(40):
            if pair.source.random() < 0.3:
                skipped = pair.tokens(pair.source.randrange(4))
                for pool in pair.pools:
                    pool.append(skipped)
            else:
                pair.step()
        memory = pair.compare()
        if text == 1:
            for pool in pair.pools:
                pool.reset()
            pair.compare()
            for pool in pair.pools:
                pool.load_memory(memory)
            assert all(torch.equal(memory[name], tensor) for name, tensor in pair.compare().items())


@pytest.mark.parametrize("seed", range(5))
def test_pools_of_several_texts_draft_and_learn_the_same(seed: int) -> None:
    first = Pair(seed, k=4, vocab_size=40, num_slots=256)
    pairs = [first, first.sibling()]
    pairs.append(pairs[1].sibling())
    for pair in pairs:
        pair.start()
    for step in range(100):
        pair = first.source.choice(pairs)
        action = first.source.random()
        if action < 0.05:
            pair.start()
        elif action < 0.2:
            skipped = pair.tokens(pair.source.randrange(4))
            for pool in pair.pools:
                pool.append(skipped)
        else:
            pair.step()
        memory = pair.compare()
        if step == 50:
            for pool in pairs[2].pools:
                pool.reset()
            first.compare()
            for pool in pairs[1].pools:
                pool.load_memory(memory)
    for pair in pairs:
        memory = pair.compare()
    assert all(torch.equal(memory[name], tensor) for name, tensor in first.compare().items())


def test_prompts_may_hold_tokens_without_a_logit() -> None:
    pair = Pair(0, k=4, vocab_size=50, num_slots=256)
    for pool in pair.pools:
        pool.start([3, 4000, 5, 3])
    pair.step()
    pair.compare()


def test_without_a_compiler_it_is_refused_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    candidate_pool.library_of_pool.cache_clear()
    with pytest.raises(
        ValueError, match="no C\\+\\+ compiler: got no-such-compiler; install g\\+\\+"
    ):
        HybridConfig()
