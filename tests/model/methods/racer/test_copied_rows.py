"""The tree of copied logits has the shape that breadths give it, and stays inside its limits.

Run: pytest tests/model/methods/racer/test_copied_rows.py
"""

from __future__ import annotations

import pytest
import torch

from model.methods.racer.automaton import PathTree
from model.methods.racer.drafter import CopiedRows

VOCAB = 100


def rows_of(k: int, rows: dict[int, list[int]]) -> CopiedRows:
    """Return rows of k tokens."""
    copied = CopiedRows(VOCAB, k)
    copied.write(list(rows), list(rows.values()))
    return copied


def grown(
    copied: CopiedRows, num_nodes: int, depth: int = 99, is_chain: bool = False
) -> set[tuple[int, ...]]:
    """Return the paths of the tree after token 1."""
    tree = PathTree(1)
    copied.grow(tree, 0, num_nodes, depth, is_chain)
    tokens, parents = tree.flat()
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


# Token t is followed by 4t - 2, 4t - 1, 4t and 4t + 1: all tokens of the tree differ.
ROWS = {token: [4 * token - 2 + place for place in range(4)] for token in range(1, 25)}


def test_breadth_is_halved_along_siblings_and_along_paths() -> None:
    copied = rows_of(4, ROWS)
    # Breadths: root 4; its children 4, 2, 1, 1.
    level1 = {(2,), (3,), (4,), (5,)}
    # Below it is halved: 2 gives 6 (2), 7, 8 and 9 (1 each); 3 gives 10 and 11; the others one each.
    level2 = {(2, 6), (2, 7), (2, 8), (2, 9), (3, 10), (3, 11), (4, 14), (5, 18)}
    level3 = {(2, 6, 22), (2, 6, 23), (2, 7, 26), (2, 8, 30), (2, 9, 34), (3, 10, 38)}
    level3 |= {(3, 11, 42), (4, 14, 54)}
    assert grown(copied, 5) == level1
    assert grown(copied, 13) == level1 | level2
    # 21 nodes are the tree of the paper's figure 9.
    assert grown(copied, 21) == level1 | level2 | level3
    assert grown(copied, 99, depth=2) == level1 | level2
    assert grown(copied, 99, depth=0) == set()
    assert grown(copied, 0) == set()


def test_the_number_of_nodes_cuts_a_level_short() -> None:
    copied = rows_of(4, ROWS)
    assert grown(copied, 4) == {(2,), (3,), (4,)}
    assert grown(copied, 7) == {(2,), (3,), (4,), (5,), (2, 6), (2, 7)}


def test_a_chain_takes_the_likeliest_token_every_time() -> None:
    assert grown(rows_of(4, ROWS), 4, is_chain=True) == {(2,), (2, 6), (2, 6, 22)}


def test_an_unread_token_is_followed_by_token_0_and_repeats_cost_nothing() -> None:
    copied = rows_of(4, {1: [7, 8, 9, 9]})
    # Of each of 7, 8 and 9 a 0 follows, however often it stands in the row; the second 9 is the first.
    level2 = {(7,), (8,), (9,), (7, 0), (8, 0), (9, 0)}
    assert grown(copied, 7) == level2
    assert grown(copied, 9) == level2 | {(7, 0, 0), (8, 0, 0)}


def test_what_the_draft_has_already_costs_nothing_and_is_expanded() -> None:
    tree = PathTree(1)
    end = tree.child(tree.child(0, 2), 6)
    tree.child(end, 50)
    rows_of(4, ROWS).grow(tree, 0, 8, 99, is_chain=False)
    # 1, 2, 6 and 50 are there; 3, 4 and 5 follow 1, and then 7 follows 2, beside 6.
    assert sorted(tree.tokens) == [1, 2, 3, 4, 5, 6, 7, 50]


def test_a_later_row_replaces_an_earlier_one_and_tokens_past_the_vocabulary_have_none() -> None:
    copied = CopiedRows(VOCAB, 2)
    copied.write([1, VOCAB, 1, 2], [[2, 3], [4, 5], [2, VOCAB + 1, 9], [6, 6]])
    assert grown(copied, 4) == {(2,), (VOCAB + 1,), (2, 6)}
    assert grown(copied, 99, depth=2) == {(2,), (VOCAB + 1,), (2, 6)}, "no row, no children"


def test_rows_are_saved_and_a_file_that_does_not_fit_is_refused() -> None:
    copied, other = rows_of(4, ROWS), CopiedRows(VOCAB, 4)
    other.load_state(copied.state())
    assert grown(other, 30) == grown(copied, 30)
    assert torch.equal(other.state(), copied.state())
    for wrong in (torch.zeros(VOCAB, 3, dtype=torch.int32), torch.zeros(VOCAB, 4)):
        with pytest.raises(ValueError, match="max_breadth"):
            other.load_state(wrong)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        other.load_state(torch.full((VOCAB, 4), VOCAB, dtype=torch.int32))
    other.clear()
    assert not other.state().any()
