"""Texts follow random changes of a model that several decoders share.

Run: pytest tests/fuzz/test_walks.py; more walks: FUZZ_WALKS=100
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.fuzz.surroundings import surroundings
from tests.fuzz.walks import NUM_CHANGES_OF_A_WALK, walked


@pytest.fixture(autouse=True, scope="module")
def _surroundings() -> Iterator[None]:
    with surroundings():
        yield


@pytest.mark.parametrize("seed", range(int(os.environ.get("FUZZ_WALKS", "8"))))
def test_texts_follow_random_changes(seed: int) -> None:
    """Fifteen changes each, of several families, beside one to three decoders, sessions and accelerated models."""
    counts = walked(seed, NUM_CHANGES_OF_A_WALK).counts
    assert counts.texts + counts.refusals + counts.plain_errors >= NUM_CHANGES_OF_A_WALK
