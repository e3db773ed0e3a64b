"""Matches in a text, against a search of the whole text."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from token_recycling_vllm.requests import LENGTHS, LONGEST_MATCH, TextIndex

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def longest_match(text: list[int], tail: list[int]) -> tuple[int, int] | None:
    """Return the latest place with the longest looked-up n-gram, and how many tokens agree there."""
    for length in LENGTHS:
        if length > len(tail):
            continue
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == tail[-length:]:
                agreeing = length
                while (
                    agreeing < min(len(tail), place)
                    and text[place - 1 - agreeing] == tail[-1 - agreeing]
                ):
                    agreeing += 1
                return place, min(agreeing, LONGEST_MATCH)
    return None


@given(TEXTS, st.integers(1, 7))
def test_the_latest_place_of_the_longest_ngram_is_found(text, step):
    index = TextIndex(64)
    for begin in range(0, len(text), step):
        index.append(np.array(text[begin : begin + step]))
    tail = text[-LONGEST_MATCH:]
    found, expected = index.longest_match(tail, 5), longest_match(text, tail)
    if found is None:
        # Another n-gram may have taken its slot: a match is missed, never wrong.
        assert expected is None or len(set(text)) > 1
    elif expected is not None:
        place, length = expected
        following, agreeing = found
        assert agreeing <= length
        if agreeing == length:
            assert following.tolist() == text[place : place + 5]


@given(st.lists(TEXTS, min_size=1, max_size=12), TEXTS)
def test_a_history_holds_whole_texts_and_forgets_the_oldest(texts, tail):
    index = TextIndex(100)
    for text in texts:
        index.begin(len(text))
        index.append(np.array(text))
    found = index.longest_match(tail[-LONGEST_MATCH:], 4)
    if found:
        following, length = found
        agreeing = tail[len(tail) - length :]
        assert length <= len(tail)
        everything = index._tokens.tolist()
        assert any(
            everything[place : place + length] == agreeing
            for place in range(len(everything) - length + 1)
        )
        assert len(following) <= 4


def test_the_end_of_a_text_is_not_its_own_match():
    index = TextIndex(64)
    index.append(np.array([1, 2, 3]))
    assert index.longest_match([1, 2, 3], 4) is None
    index.append(np.array([1]))
    assert index.longest_match([3, 1], 2)[0].tolist() == [2, 3]
