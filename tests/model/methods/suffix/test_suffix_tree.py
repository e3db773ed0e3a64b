"""The suffix tree counts and ranks as a slow one that holds every string, texts that leave included.

Run: pytest tests/model/methods/suffix/test_suffix_tree.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from model.methods.suffix.suffix_tree import Node, OpenText, SuffixTree
from tests.model.methods.suffix.reference_tree import SlowTree

PROMPT = 99  # a token before a text


def nodes_of(tree: SuffixTree) -> Iterator[Node]:
    """Yield all nodes but the root."""
    waiting = list(tree.root.children.values())
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        yield node


def agrees(tree: SuffixTree, slow: SlowTree, depth: int) -> None:
    """Assert that counts, rankings and the number of nodes are right."""
    for string, count in list(slow.counts.items()):
        place = tree.find(string)
        assert (place.node.count if place else 0) == count, string
        if not place:
            continue
        rest = place.node.run(place.position, 1)
        following = rest or [child.text[child.begin] for child in place.node.ranked]
        assert following == (slow.ranked[string] if len(string) < depth else []), string
    nodes = list(nodes_of(tree))
    assert len(nodes) == tree.num_nodes
    for node in nodes:
        assert node.length > 0
        assert all(child.count < node.count for child in node.children.values()), "one run"


@pytest.mark.parametrize("seed", range(24))
def test_counts_and_ranks_are_those_of_a_slow_tree(seed: int) -> None:
    source = random.Random(seed)
    depth, alphabet, kept = (
        source.choice([2, 3, 5, 9]),
        source.choice([1, 2, 4]),
        source.choice([1, 3]),
    )
    tree, slow = SuffixTree(depth), SlowTree(depth)
    texts: list[list[int]] = []
    for _ in range(7):
        if len(texts) > kept:
            slow.remove(texts[0])
            tree.remove(texts.pop(0))
            agrees(tree, slow, depth)
            shown = {id(text) for text in texts}
            assert all(id(node.text) in shown for node in nodes_of(tree)), (
                "a text that left is held"
            )
        text = tree.open_text()
        texts.append(text.tokens)
        for _ in range(source.randrange(4)):
            begin = len(texts[-1])
            text.extend([source.randrange(alphabet) for _ in range(source.randrange(6))])
            slow.add(texts[-1], begin)
            agrees(tree, slow, depth)


@pytest.mark.parametrize("seed", range(12))
def test_places_are_those_of_all_suffixes_that_occurred(seed: int) -> None:
    source = random.Random(seed)
    depth = source.choice([3, 6, 30])
    tree = SuffixTree(depth)
    for _ in range(3):
        prompt = [source.randrange(3) for _ in range(source.randrange(1, 9))]
        text = tree.open_text()
        for _ in range(12):
            context = (prompt + text.tokens)[-depth:]
            places = list(text.places(context))
            found = [tree.find(context[-size:]) for size in range(1, len(context))]
            expected = [place for place in found if place]
            assert found[: len(expected)] == expected, "shorter suffixes occur where longer ones do"
            for size, place in enumerate(expected, start=1):
                # The end of the text in progress is no earlier place: there nothing can follow.
                if size > len(places):
                    assert size <= len(text.tokens)
                    assert place.node.count == 1 and not place.node.run(place.position, 1)
                else:
                    assert places[size - 1] == place
            text.extend([source.randrange(3)])


@pytest.mark.parametrize("seed", range(60))
def test_texts_that_are_open_at_once_are_counted_as_by_a_slow_tree(seed: int) -> None:
    source = random.Random(seed)
    depth, alphabet = source.choice([2, 3, 5, 9]), source.choice([1, 2, 4])
    tree, slow = SuffixTree(depth), SlowTree(depth)
    is_open: list[OpenText] = []
    kept: list[list[int]] = []  # the tokens of all texts, the oldest first
    for _ in range(50):
        action = source.random()
        if action < 0.15 or not is_open:
            is_open.append(tree.open_text())
        elif action < 0.25:
            is_open.pop(source.randrange(len(is_open)))  # the text ends
        elif action < 0.35 and kept:
            slow.remove(kept[0])
            tree.remove(kept.pop(0))
        else:
            text = source.choice(is_open)
            begin = len(text.tokens)
            others = [each.tokens for each in is_open if each is not text and each.tokens]
            if others and source.random() < 0.5:  # it says what another one says
                other = source.choice(others)
                place = source.randrange(len(other))
                text.extend(other[place : place + source.randint(1, 6)])
            else:
                text.extend([source.randrange(alphabet) for _ in range(source.randint(1, 5))])
            if not begin:
                kept.append(text.tokens)
            slow.add(text.tokens, begin)
        agrees(tree, slow, depth)
        for text in is_open:
            tokens = text.tokens
            known = [
                size
                for size in range(1, min(depth, len(tokens) + 1))
                if slow.counts[tuple(tokens[-size:])] > 1
            ]
            places = list(text.places([PROMPT, *tokens][-depth:]))
            assert len(places) == len(known) == len(text.ends) - 1
            assert places == [tree.find(tokens[len(tokens) - size :]) for size in known]
    for text in is_open:
        text.begin()
    for tokens in kept:
        tree.remove(tokens)
    assert tree.num_nodes == 0


def test_a_cleared_tree_goes_on_with_the_texts_that_are_open() -> None:
    tree = SuffixTree(5)
    first, second = tree.open_text(), tree.open_text()
    first.extend([1, 2, 3])
    second.extend([1, 2])
    tree.clear()
    assert tree.num_nodes == 0 and first.tokens == second.tokens == []
    second.extend([2, 3])
    first.extend([2, 3, 2])
    place = tree.find([2, 3])
    assert place is not None and place.node.count == 2


def test_an_emptied_tree_holds_nothing() -> None:
    tree = SuffixTree(4)
    texts = []
    for tokens in ([1, 2, 1, 2, 3], [1, 2, 1], [2, 2, 2, 2, 2, 2]):
        text = tree.open_text()
        text.extend(tokens)
        texts.append(text.tokens)
    place = tree.find([1, 2])
    assert place is not None and place.node.count == 3
    for kept in texts:
        tree.remove(kept)
    assert tree.num_nodes == 0 and tree.find([2]) is None


def test_a_repeated_text_takes_few_nodes() -> None:
    tree = SuffixTree(64)
    tree.open_text().extend([number % 7 for number in range(2000)])
    assert tree.num_nodes <= 70
