"""The pool holds what the authors' rule gives, by a slow reference that applies it to every place again.

Run: pytest tests/model/methods/logitspec/test_ngram_pool.py
"""

from __future__ import annotations

import random

import pytest

from model.methods.logitspec.drafter import NgramPool


def reference(text: list[int], size: int, length: int) -> dict[tuple[int, ...], list[int]]:
    """Return the continuations after the text grew token by token.

    At every length every n-gram with something after it is added again, from left to right, and
    replaces what is known unless that is longer.
    """
    known: dict[tuple[int, ...], list[int]] = {}
    for end in range(len(text) + 1):
        for start in range(end):
            for stop in range(start + 1, min(start + size, end - 1) + 1):
                found = text[stop:end][:length]
                if len(found) >= len(known.get(tuple(text[start:stop]), [])):
                    known[tuple(text[start:stop])] = found
    return known


@pytest.mark.parametrize("seed", range(6))
def test_every_n_gram_is_followed_by_what_the_rule_says(seed: int) -> None:
    source = random.Random(seed)
    size, length = source.randrange(1, 4), source.randrange(1, 6)
    text: list[int] = []
    pool = NgramPool(size, length)
    for _ in range(8):
        new = source.choices(range(4), k=source.randrange(1, 5))
        pool.extend(new)
        text += new
        known = reference(text, size, length)
        for start in range(len(text)):
            for stop in range(start + 1, start + size + 1):
                ngram = tuple(text[start:stop])
                endings = (ngram[skipped:] for skipped in range(len(ngram)))
                expected = next((known[end] for end in endings if end in known), [])
                assert pool.after(ngram) == expected


def test_the_longest_known_ending_is_continued() -> None:
    pool = NgramPool(3, 2)
    pool.extend([1, 2, 3, 4, 5, 2, 3, 6, 7])
    assert pool.after([1, 2, 3]) == [4, 5]
    assert pool.after([9, 2, 3]) == [6, 7], "the latest place of 2 3"
    assert pool.after([9, 9, 4]) == [5, 2]
    assert pool.after([9, 9, 9]) == []
    assert pool.after([7]) == [], "nothing follows the end of the text"


def test_the_latest_whole_continuation_wins_over_a_later_short_one() -> None:
    pool = NgramPool(1, 3)
    pool.extend([1, 2, 3])
    assert pool.after([1]) == [2, 3]
    pool.extend([1, 4])
    assert pool.after([1]) == [2, 3, 1], "the first one is whole now, the second is not"
    pool.extend([5, 6])
    assert pool.after([1]) == [4, 5, 6]
