"""The suffix tree counts and ranks as a slow one that holds every string, texts that leave included.

Run: pytest tests/model/methods/suffix/test_suffix_tree.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from model.methods.suffix.suffix_tree import Node, SuffixTree
from tests.model.methods.suffix.reference_tree import SlowTree


def nodes_of(tree: SuffixTree) -> Iterator[Node]:
    """Yield all nodes but the root."""
    waiting = list(tree._root.children.values())
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        yield node


def agrees(tree: SuffixTree, slow: SlowTree, depth: int) -> None:
    """Assert that counts, rankings and the number of nodes are right."""
    for string, count in list(slow.counts.items()):
        place = tree._find(string)
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
        texts.append(tree.begin_text())
        for _ in range(source.randrange(4)):
            begin = len(texts[-1])
            tree.extend([source.randrange(alphabet) for _ in range(source.randrange(6))])
            slow.add(texts[-1], begin)
            agrees(tree, slow, depth)


@pytest.mark.parametrize("seed", range(12))
def test_places_are_those_of_all_suffixes_that_occurred(seed: int) -> None:
    source = random.Random(seed)
    depth = source.choice([3, 6, 30])
    tree = SuffixTree(depth)
    for _ in range(3):
        prompt = [source.randrange(3) for _ in range(source.randrange(1, 9))]
        text = tree.begin_text()
        for _ in range(12):
            context = (prompt + text)[-depth:]
            places = list(tree.places(context))
            found = [tree._find(context[-size:]) for size in range(1, len(context))]
            expected = [place for place in found if place]
            assert found[: len(expected)] == expected, "shorter suffixes occur where longer ones do"
            for size, place in enumerate(expected, start=1):
                # The end of the text in progress is no earlier place: there nothing can follow.
                if size > len(places):
                    assert size <= len(text)
                    assert place.node.count == 1 and not place.node.run(place.position, 1)
                else:
                    assert places[size - 1] == place
            tree.extend([source.randrange(3)])


def test_an_emptied_tree_holds_nothing() -> None:
    tree = SuffixTree(4)
    texts = []
    for text in ([1, 2, 1, 2, 3], [1, 2, 1], [2, 2, 2, 2, 2, 2]):
        texts.append(tree.begin_text())
        tree.extend(text)
    place = tree._find([1, 2])
    assert place is not None and place.node.count == 3
    for text in texts:
        tree.remove(text)
    assert tree.num_nodes == 0 and tree._find([2]) is None


def test_a_repeated_text_takes_few_nodes() -> None:
    tree = SuffixTree(64)
    tree.extend([number % 7 for number in range(2000)])
    assert tree.num_nodes <= 70
