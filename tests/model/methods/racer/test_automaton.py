"""The automaton counts n-grams, links them as the definition says, stays bounded and finds continuations.

Run: pytest tests/model/methods/racer/test_automaton.py
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from model.methods.racer.automaton import ROOT, Automaton, PathTree

SIZE = 4


def automaton_of(text: list[int], max_nodes: int = 10_000) -> Automaton:
    """Return an automaton of all n-grams of a text."""
    automaton = Automaton(max_nodes)
    for begin in range(len(text) - SIZE + 1):
        automaton.add(text[begin : begin + SIZE])
    automaton.build_links()
    return automaton


def ngram_of(automaton: Automaton, node: int) -> tuple[int, ...]:
    """Return the tokens from the root to a node."""
    path = []
    while node != ROOT:
        path.append(automaton.tokens[node])
        node = automaton.parents[node]
    return tuple(reversed(path))


def retrieved(automaton: Automaton, state: int, token: int, **limits: int) -> set[tuple[int, ...]]:
    """Return the paths that are drafted after a text's state and a token."""
    tree = PathTree(token)
    automaton.retrieve(
        state, tree, limits.get("num_nodes", 1000), limits.get("max_depth", 1000), is_chain=False
    )
    tokens, parents = tree.flat()
    paths: list[tuple[int, ...]] = [()]
    for drafted, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], drafted))
    return set(paths[1:])


def random_text(length: int, seed: int) -> list[int]:
    """Return a text of few different tokens, so that it repeats itself."""
    return random.Random(seed).choices(range(4), k=length)


def test_counts_and_links_are_those_of_the_definition() -> None:
    text = random_text(60, seed=1)
    automaton = automaton_of(text)
    windows = [tuple(text[begin : begin + SIZE]) for begin in range(len(text) - SIZE + 1)]
    counts = Counter(window[:length] for window in windows for length in range(SIZE + 1))
    nodes = {ngram_of(automaton, node): node for node in range(len(automaton.tokens))}
    assert {ngram: automaton.counts[node] for ngram, node in nodes.items()} == counts
    for ngram, node in nodes.items():
        suffixes = (ngram[begin:] for begin in range(1, len(ngram) + 1))
        longest = next((suffix for suffix in suffixes if suffix in nodes), ())
        assert automaton.links[node] == nodes[longest], ngram
        assert automaton.depths[node] == len(ngram)


@pytest.mark.parametrize("seed", range(5))
def test_what_followed_every_known_suffix_is_drafted(seed: int) -> None:
    text = random_text(60, seed)
    automaton = automaton_of(text)
    source = random.Random(seed)
    *read, token = source.choices(range(4), k=source.randrange(1, 4))
    state = automaton.advance(ROOT, read)
    windows = [tuple(text[begin : begin + SIZE]) for begin in range(len(text) - SIZE + 1)]
    expected = set()
    for length in range(2, len(read) + 2):  # a suffix of one token is left to the rows
        suffix = (*read, token)[-length:]
        for window in windows:
            if window[:length] == suffix:
                expected |= {window[length:end] for end in range(length + 1, SIZE + 1)}
    assert retrieved(automaton, state, token) == expected


def test_the_most_frequent_continuations_win_and_among_equals_the_shallow_ones() -> None:
    automaton = Automaton(100)
    for ngram, count in (((1, 2, 3, 4), 3), ((1, 2, 5, 6), 2), ((1, 2, 7, 8), 1)):
        for _ in range(count):
            automaton.add(ngram)
    automaton.build_links()
    expected = [(3,), (3, 4), (5,), (5, 6)]
    for num_nodes in range(1, 6):  # one is the match itself, which becomes the root
        state = automaton.advance(ROOT, [1])
        assert retrieved(automaton, state, 2, num_nodes=num_nodes) == set(expected[: num_nodes - 1])
    state = automaton.advance(ROOT, [1])
    assert retrieved(automaton, state, 2, max_depth=1) == {(3,), (5,), (7,)}


def test_a_chain_follows_the_most_frequent_tokens_after_the_longest_match() -> None:
    automaton = Automaton(100)
    for ngram in ((1, 2, 3, 4), (1, 2, 5, 6), (1, 2, 5, 7), (2, 3, 9, 9)):
        automaton.add(ngram)
    automaton.build_links()
    state = automaton.advance(ROOT, [1])
    tree = PathTree(2)
    found = automaton.retrieve(state, tree, 10, 10, is_chain=True)
    # 5 was seen twice after 1, 2; after 1, 2, 5 the newer of two equals comes first.
    assert tree.flat()[0] == [2, 5, 7]
    assert (found.end, found.depth) == (2, 2)


def test_the_nodes_touched_longest_ago_make_room() -> None:
    automaton = Automaton(5)
    automaton.add((1, 2))
    automaton.add((3, 4))
    automaton.add((1, 2))  # touched again
    assert len(automaton.tokens) == 5
    automaton.add((5, 6))  # takes the places of 3 and of 3, 4
    assert {ngram_of(automaton, node) for node in range(5)} == {(), (1,), (1, 2), (5,), (5, 6)}
    automaton.add((1, 7))
    # 1 is touched on the way, so its child 2 goes.
    assert {ngram_of(automaton, node) for node in range(5)} == {(), (1,), (1, 7), (5,), (5, 6)}


def test_an_inner_node_that_makes_room_takes_what_is_below_it_out_of_the_trie() -> None:
    automaton = Automaton(5)
    automaton.add((1, 2, 3))
    automaton.add((4,))
    automaton.add((5,))  # the place of 1, which was touched before 2 and 3
    assert set(automaton.children[ROOT]) == {4, 5}
    automaton.add((1, 2))
    assert ngram_of(automaton, automaton.children[ROOT][1]) == (1,)


@pytest.mark.parametrize("max_nodes", [6, 40, 10_000])
def test_a_saved_automaton_goes_on_as_the_first_one(max_nodes: int) -> None:
    text = random_text(300, seed=2)
    first, second = automaton_of(text[:200], max_nodes), Automaton(max_nodes)
    second.load_state(first.state())
    states = [ROOT, ROOT]
    for begin in range(200, 290):
        drafts = []
        for each, automaton in enumerate((first, second)):
            automaton.add(text[begin - SIZE : begin])
            state = automaton.advance(states[each], text[begin : begin + 1])
            tree = PathTree(text[begin + 1])
            states[each] = automaton.retrieve(state, tree, 8, 1000, is_chain=False).state
            drafts.append(tree.flat())
        assert drafts[0] == drafts[1]
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state().values(), second.state().values(), strict=True)
    )


def test_a_text_under_way_goes_on_at_the_root_of_a_cleared_automaton() -> None:
    automaton = automaton_of(random_text(60, seed=1))
    state = automaton.advance(ROOT, [0, 1, 2])
    assert state != ROOT
    automaton.clear()
    assert automaton.advance(state, [3]) == ROOT
    assert retrieved(automaton, state, 3) == set()


# Tokens, parents, counts, depths and links of the root and of 1, 1 2 and 1 2 3, wrong in one column.
CIRCLE_OF_PARENTS, CIRCLE_OF_LINKS = (
    torch.tensor(
        [[-1, -1, 1, 0, 0], [1, parent, 1, 1, link], [2, 1, 1, 2, 1], [3, 2, 1, 3, 0]],
        dtype=torch.int32,
    )
    for parent, link in ((2, 0), (0, 2))
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nodes", torch.zeros(3, 5, dtype=torch.int32)),
        ("nodes", torch.full((4, 5), 9, dtype=torch.int32)),
        ("edges", torch.full((1, 2), 4, dtype=torch.int32)),
        ("edges", torch.zeros(1, 2)),
        ("nodes", CIRCLE_OF_PARENTS),
        ("nodes", CIRCLE_OF_LINKS),
        ("edges", torch.tensor([[0, 1], [1, 1]], dtype=torch.int32)),
        ("touched", torch.zeros(4, dtype=torch.int32)),
        ("touched", torch.arange(7, dtype=torch.int32)),
    ],
)
def test_a_file_that_is_no_automaton_is_refused(name: str, value: torch.Tensor) -> None:
    automaton = Automaton(6)
    automaton.add((1, 2, 3))
    state = automaton.state()
    Automaton(6).load_state(state)
    with pytest.raises(ValueError, match="at most 6 nodes; allowed"):
        Automaton(6).load_state({**state, name: value})
