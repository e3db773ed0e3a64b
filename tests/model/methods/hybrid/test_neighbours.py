"""Neighbours: the most similar state among the newest records is found, in bounded memory.

Run: pytest tests/model/methods/hybrid/test_neighbours.py
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from model.engine.read_out import sampled_ids
from model.methods.hybrid import tables as module
from model.methods.hybrid.tables import BYTES_OF_TOKEN, FIRST, LENGTH, NOBODY, NUM_CODES, NUM_STEPS
from tests.model.methods.hybrid.misfits import misfits
from tests.model.methods.hybrid.reference_tables import ReferenceNeighbours as Neighbours
from tests.model.methods.hybrid.reference_tables import states_of

VOCAB, NUM_RECORDS = 5, 40


@pytest.fixture(autouse=True)
def _few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_RECORDS", NUM_RECORDS)


class Added(NamedTuple):
    """A record, as it was added."""

    token: int
    before: np.ndarray
    after: np.ndarray
    row: list[int]


def filled(seed: int, num_compared: int, count: int) -> tuple[Neighbours, list[Added]]:
    """Return neighbours after random records, and all that were ever added."""
    source, numbers = random.Random(seed), np.random.default_rng(seed)
    found, added = Neighbours(num_compared, 2, VOCAB), []
    for _ in range(count):
        states = numbers.integers(-2, 3, (2, VOCAB)).astype(np.int8)
        row = [source.randrange(VOCAB) * NUM_CODES + source.randrange(2 * FIRST) for _ in range(2)]
        record = Added(source.randrange(VOCAB), *states, row)
        found.add(*record)
        found.add(VOCAB, *states, [0, 0])  # a token without a logit is not kept
        added.append(record)
    return found, added


def slowly_found(added: list[Added], token: int, state: np.ndarray, num_compared: int) -> int:
    """Return the expected result of `find`, by searching everything that was ever added."""
    here = range(max(0, len(added) - NUM_RECORDS), len(added))
    numbers = [number for number in here if added[number].token == token][-num_compared:]
    product = {number: int(state.astype(int) @ added[number].before) for number in numbers}
    return max(product, key=lambda number: (product[number], number), default=NOBODY)


@pytest.mark.parametrize("num_compared", [1, 3, 99])
@pytest.mark.parametrize("count", [0, 1, 20, 130])
def test_the_likest_state_is_found_and_the_newest_of_equal_ones(
    count: int, num_compared: int
) -> None:
    found, added = filled(count, num_compared, count)
    states = np.random.default_rng(9).integers(-2, 3, (30, VOCAB)).astype(np.int8)
    for state in states:
        for token in range(VOCAB):
            number, likeness = found.find(token, state)
            assert number == slowly_found(added, token, state, num_compared)
            assert 0 <= likeness < NUM_STEPS
            if number != NOBODY:
                after = found.after(number)
                assert after is not None and after.tolist() == added[number].after.tolist()
                assert found.row(number) == added[number].row
        assert found.find(VOCAB, state) == (NOBODY, 0)
    assert found.find(1, None) == (NOBODY, 0) and found.after(NOBODY) is None


def test_likeness_rises_with_the_cosine() -> None:
    states = states_of(
        torch.tensor([[-1.0, 0, 0, 0, 1], [-1, 1, 0, -1, 1], [0, 1, -2, 1, 0], [1, 0, 0, 0, -1]])
    )
    likenesses = []
    for state in states:
        found = Neighbours(9, 1, VOCAB)
        found.add(2, state, state, [7])
        number, likeness = found.find(2, states[0])
        assert number == 0
        likenesses.append(likeness)
    expected = (1.0, 1 / math.sqrt(2), 0.0, -1.0)
    steps = [min(max(math.floor(cosine * NUM_STEPS), 0), NUM_STEPS - 1) for cosine in expected]
    assert likenesses == steps == [15, 11, 0, 0]


@pytest.mark.parametrize("count", [0, 5, 100])
def test_memory_moves_to_another(count: int) -> None:
    found, added = filled(1, 4, count)
    memory = found.memory()
    assert [len(memory[name]) for name in memory] == [min(count, NUM_RECORDS)] * 4
    other, shift = filled(2, 4, 3)[0], max(0, count - NUM_RECORDS)
    other.check_memory(memory)
    other.load_memory(memory)
    for record in added:
        for token in range(VOCAB):
            number, likeness = found.find(token, record.after)
            expected = (NOBODY if number == NOBODY else number - shift, likeness)
            assert other.find(token, record.after) == expected
    assert all(torch.equal(values, memory[name]) for name, values in other.memory().items())
    other.reset()
    assert other.find(1, np.ones(VOCAB, dtype=np.int8)) == (NOBODY, 0)
    assert not len(other.memory()["state_tokens"])


def test_memory_that_does_not_fit_is_refused() -> None:
    found, _ = filled(3, 4, 5)
    good = found.memory()
    for name in good:
        for bad in misfits(good, name):
            with pytest.raises(ValueError, match="matrix: got"):
                found.check_memory(bad)
    for name, value, said in (
        *(("state_rows", entry, "outside the vocabulary") for entry in (-1, VOCAB * NUM_CODES)),
        ("state_rows", 2 * FIRST, "a code above 27"),
        *(("state_tokens", token, "outside the vocabulary") for token in (-1, VOCAB)),
    ):
        with pytest.raises(ValueError, match=said):
            found.check_memory({**good, name: torch.full_like(good[name], value)})
    with pytest.raises(ValueError, match=r"got 5 states; allowed: 0"):
        Neighbours(0, 2, VOCAB).check_memory(good)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for vocab_size, expected in (
        (8192, 2**15),
        (32_000, 2**15),
        (128_256, 26_884),
        (262_144, 16_764),
    ):
        found = Neighbours(32, 8, vocab_size)
        of_tokens = vocab_size * (BYTES_OF_TOKEN - 8)  # counts, and which are in the text
        assert found.num_bytes + of_tokens <= 6 * 2**20
        assert len(found.arrays["before"]) == expected
    assert Neighbours(0, 8, 8192).num_bytes < 2**17
    assert len(Neighbours(32, 8, 10**6).arrays["before"]) == 1, (
        "a vocabulary that takes all there is"
    )


def test_states_depend_on_differences_of_logits_alone() -> None:
    # Whole numbers, as they are rounded to.
    logit_samples = (torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * 8).round()

    def lengths(states: np.ndarray) -> list[float]:
        return np.sqrt((states.astype(float) ** 2).sum(axis=1)).tolist()

    states = states_of(logit_samples)
    assert states.dtype == np.int8
    assert lengths(states) == pytest.approx([LENGTH] * 7, rel=0.02)
    assert np.abs(states.astype(int) - states_of(logit_samples * 2 + 8)).max() <= 1
    exact = logit_samples - logit_samples.mean(dim=1, keepdim=True)
    exact = exact / exact.norm(dim=1, keepdim=True) * LENGTH
    assert np.abs(states - exact.numpy()).max() < 1
    assert not states_of(torch.full((2, 64), 3.0)).any(), "equal logits"
    logit_samples[:, 5], logit_samples[:, 6] = -torch.inf, torch.nan
    assert lengths(states_of(logit_samples)) == pytest.approx([LENGTH] * 7, rel=0.02), "ruled out"
    assert states_of(torch.full((1, 1), 3.0)).tolist() == [[0]], "one token"


@pytest.mark.parametrize("vocab_size", [1, 3, 64, 65, 127, 128, 8192, 128_256])
def test_probes_are_spread_over_the_vocabulary(vocab_size: int) -> None:
    ids = sampled_ids(vocab_size)
    assert len(ids) == min(64, vocab_size)
    assert ids[0] == 0 and ids[-1] < vocab_size and ids[-1] >= vocab_size // 2 * (vocab_size > 1)
