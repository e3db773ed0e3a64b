"""The most frequent tokens are kept in order while they are counted.

Run: pytest tests/model/methods/hybrid/test_frequent_tokens.py
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from model.methods.hybrid.candidate_pool import NUM_FREQUENT, CandidatePool
from tests.model.methods.hybrid.reference_tables import ReferenceFrequentTokens as FrequentTokens


@pytest.mark.parametrize("seed", range(5))
def test_the_most_frequent_are_found(seed: int) -> None:
    source = random.Random(seed)
    frequent, counts = FrequentTokens(50), Counter[int]()
    for _ in range(300):
        tokens = [min(int(source.expovariate(0.1)), 49) for _ in range(source.randrange(4))]
        frequent.append(tokens)
        counts.update(tokens)
        found = [counts[token] for token in frequent.top]
        assert found == sorted(counts.values(), reverse=True)[:NUM_FREQUENT]
        assert len(set(frequent.top)) == len(frequent.top)
        resumed = FrequentTokens(50)
        resumed.load_state(frequent.counts)
        assert resumed.top == frequent.top


def test_counts_move_to_another() -> None:
    frequent, other = FrequentTokens(10), FrequentTokens(10)
    frequent.append([3, 3, 3, 5, 5, 1])
    other.load_state(frequent.counts)
    assert other.top == [3, 5, 1]
    other.reset()
    assert other.top == []
    assert frequent.top == [3, 5, 1]


@pytest.mark.parametrize(
    "bad", [torch.zeros(9, dtype=torch.int32), torch.zeros(10), torch.full((10,), -1).int()]
)
def test_counts_that_do_not_fit_are_refused(bad: torch.Tensor) -> None:
    pool = CandidatePool(2**8, 2, 10)
    with pytest.raises(ValueError, match=r"matrix: .*counts"):
        pool.load_memory(pool.memory() | {"counts": bad})
