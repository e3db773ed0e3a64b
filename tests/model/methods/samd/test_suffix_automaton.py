"""The suffix automaton finds what a slow search finds, in linear time and memory.

Run: pytest tests/model/methods/samd/test_suffix_automaton.py
"""

from __future__ import annotations

import random

import pytest

from model.methods.samd.automata import SuffixAutomaton


def slow_matches(text: list[int], num_tokens: int) -> tuple[int, list[list[int]]]:
    """Return the length of the longest suffix that occurs earlier, and what followed it each time."""
    for size in range(len(text) - 1, 0, -1):
        suffix = text[-size:]
        found = [end for end in range(size, len(text)) if text[end - size : end] == suffix]
        if found:
            return size, [text[end : end + num_tokens] for end in found]
    return 0, [[]]


def texts(seed: int) -> list[int]:
    """Return a random text over few tokens, so that much of it repeats."""
    source = random.Random(seed)
    return [source.randrange(source.choice([1, 2, 4])) for _ in range(40)]


@pytest.mark.parametrize("seed", range(60))
def test_matches_equal_a_slow_search_after_every_token(seed: int) -> None:
    text = texts(seed)
    first, latest = SuffixAutomaton(), SuffixAutomaton(prefers_latest=True)
    for length, token in enumerate(text, start=1):
        first.extend([token])
        latest.extend([token])
        size, continuations = slow_matches(text[:length], 5)
        assert first.match(5)[:2] == (size, continuations[0]), "the first occurrence is continued"
        assert latest.match(5).length == size
        assert latest.match(5).continuation in continuations


def test_the_latest_occurrence_is_continued_if_asked() -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    assert SuffixAutomaton(text).match(2)[:2] == (2, [7, 1])
    assert SuffixAutomaton(text, prefers_latest=True).match(2)[:2] == (2, [8, 1])


def test_a_text_without_repetition_has_no_match() -> None:
    for text in ([], [5], [5, 6, 7]):
        assert SuffixAutomaton(text).match(9)[:2] == (0, [])


def fibonacci_word(length: int) -> list[int]:
    """Return a text with as many states as a text can have, or nearly."""
    shorter, longer = [0], [0, 1]
    while len(longer) < length:
        shorter, longer = longer, longer + shorter
    return longer[:length]


class CountingList(list):
    """A list that counts how often an item of it is read."""

    num_reads = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        """Return an item."""
        type(self).num_reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("name", ["one token", "two tokens", "fibonacci", "no repeats", "abbb"])
def test_memory_and_work_grow_linearly(name: str) -> None:
    source = random.Random(0)
    size = 4000
    text = {
        "one token": [0] * size,
        "two tokens": [source.randrange(2) for _ in range(size)],
        "fibonacci": fibonacci_word(size),
        "no repeats": list(range(size)),
        "abbb": [0, *[1] * (size - 2), 2],
    }[name]
    automaton = SuffixAutomaton(prefers_latest=True)
    CountingList.num_reads = 0
    automaton.links = CountingList(automaton.links)
    automaton.extend(text)
    assert len(automaton.links) <= 2 * size
    assert sum(map(len, automaton.transitions)) <= 3 * size
    # Every walk along links reads one for each step.
    assert CountingList.num_reads <= 6 * size
