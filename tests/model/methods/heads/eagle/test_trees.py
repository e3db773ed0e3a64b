"""Trees worked out by hand from the authors' rules, on a draft network that is a table.

EAGLE-2's and EAGLE-3's rule is `topK_genrate` of SafeAILab/EAGLE, eagle/model/cnets.py; EAGLE's tree
is `mc_sim_7b_63` of eagle/model/choices.py.

Run: pytest tests/model/methods/heads/eagle/test_trees.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from model.methods.heads.eagle.trees import PATHS, Grown, fixed_shape, grow_fixed, grow_likeliest

VOCAB = 8
# Probabilities of the next token, by the last one; 0 is the text's.
TABLE: Mapping[int, Mapping[int, float]] = {
    0: {1: 0.6, 2: 0.3, 3: 0.1},
    1: {2: 0.5, 4: 0.4, 3: 0.1},
    2: {5: 0.9, 1: 0.1},
    3: {1: 0.5, 2: 0.5},
    4: {1: 0.99, 2: 0.01},
    5: {3: 0.8, 4: 0.2},
}


class TableDraft:
    """A draft whose guesses depend on the last token alone; it notes what is read."""

    def __init__(self, table: Mapping[int, Mapping[int, float]] = TABLE) -> None:
        self._table = table
        self._last = [0]
        self.read: list[list[tuple[int, int]]] = []
        self.logits = self._rows()

    def deepen(self, parents: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Read a level."""
        level = list(zip(parents.tolist(), token_ids.tolist(), strict=True))
        assert all(place < len(self._last) for place, _ in level)
        self.read.append([(self._last[place], token) for place, token in level])
        self._last = token_ids.tolist()
        self.logits = self._rows()

    def token_ids(self, places: torch.Tensor) -> torch.Tensor:
        """Places are tokens."""
        return places

    def grown(self, key: object, grow: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Grow, as a text does."""
        return grow(self)

    def _rows(self) -> torch.Tensor:
        rows = torch.full((len(self._last), VOCAB), 1e-9)
        for row, last in enumerate(self._last):
            for token, probability in self._table.get(last, {}).items():
                rows[row, token] = probability
        return rows.log()


def grown(*arguments: int, table: Mapping[int, Mapping[int, float]] = TABLE) -> tuple[Grown, Any]:
    """Grow a tree; return it with what was read."""
    draft = TableDraft(table)
    return grow_likeliest(draft, *arguments), draft.read  # type: ignore[arg-type]


def test_the_most_probable_candidates_are_the_tree() -> None:
    # Two nodes are read on a level, and two tokens guessed after each:
    # level 1: 1 (0.6), 2 (0.3); both are read
    # level 2: 1 2 (0.30), 1 4 (0.24), 2 5 (0.27), 2 1 (0.03); 1 2 and 2 5 are read
    # level 3: 1 2 5 (0.27), 1 2 1 (0.03), 2 5 3 (0.216), 2 5 4 (0.054)
    # The five most probable, level by level: 1, 2, 1 2, 2 5, 1 2 5.
    tree, read = grown(5, 3, 2)
    assert tree == Grown([1, 2, 2, 5, 5], (0, 0, 1, 2, 3))
    assert read == [[(0, 1), (0, 2)], [(1, 2), (2, 5)]]


def test_a_node_that_is_not_read_has_no_children() -> None:
    # 1 4 1 would have 0.2376, more than 2 5 3 with 0.216; but 1 4 is the third of its level.
    tree, _ = grown(7, 3, 2)
    assert tree == Grown([1, 2, 2, 4, 5, 5, 3], (0, 0, 1, 1, 2, 3, 5))


def test_of_one_level_the_tree_is_a_star() -> None:
    assert grown(2, 1, 3) == (Grown([1, 2], (0, 0)), [])


def test_one_wide_it_is_the_chain_of_likeliest_tokens() -> None:
    assert grown(4, 4, 1)[0] == Grown([1, 2, 5, 3], (0, 1, 2, 3))


def test_a_certain_child_never_comes_without_its_parent() -> None:
    certain = {token: {token + 1: 1.0} for token in range(6)}
    for num_nodes in range(1, 6):
        tree, _ = grown(num_nodes, 5, 2, table=certain)
        assert tree == Grown(list(range(1, num_nodes + 1)), tuple(range(num_nodes)))


def test_logits_that_are_no_numbers_make_a_tree_all_the_same() -> None:
    draft = TableDraft()
    draft.logits = torch.full((1, VOCAB), torch.nan)
    tree = grow_likeliest(draft, 6, 3, 2)  # type: ignore[arg-type]
    assert len(tree.tokens) == 6
    assert all(parent <= node for node, parent in enumerate(tree.parents))


def ranks_of(last: int) -> list[int]:
    """Tokens after the last one, the likeliest first."""
    found = TABLE.get(last, {})
    return sorted(found, key=lambda token: -found[token])


def test_eagles_tree_holds_the_token_of_each_rank() -> None:
    assert len(PATHS) == 25
    assert all(path[:-1] in {(), *PATHS} for path in PATHS)
    few = [path for path in PATHS if max(path) < 2]  # the table knows two tokens after each
    draft = TableDraft()
    shape = fixed_shape(25, 5, False)
    tree = grow_fixed(draft, shape)  # type: ignore[arg-type]
    by_path = {(): 0}  # path -> node
    paths = sorted(PATHS, key=lambda path: (len(path), path))
    for node, path in enumerate(paths, start=1):
        assert tree.parents[node - 1] == by_path[path[:-1]]
        by_path[path] = node
    last_of = {0: 0} | dict(enumerate(tree.tokens, start=1))
    for path in few:
        node = by_path[path]
        assert last_of[node] == ranks_of(last_of[tree.parents[node - 1]])[path[-1]]
    # Nodes with children alone are read: 0, 1, 2, 3; 00, 01, 02, 10; 000; 0000.
    assert [len(level) for level in draft.read] == [4, 4, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "paths"),
    [
        # Smallest sum of steps and ranks first: 0 has 1; 1 and 00 have 2; 2 has 3.
        ((4, 5, False), [(0,), (1,), (2,), (0, 0)]),
        ((25, 1, False), [(0,), (1,), (2,), (3,)]),
        ((25, 5, True), [(0,) * depth for depth in range(1, 6)]),
        ((2, 5, True), [(0,), (0, 0)]),
    ],
)
def test_eagles_tree_is_cut(arguments: tuple[int, int, bool], paths: list[tuple[int, ...]]) -> None:
    shape = fixed_shape(*arguments)
    node_of = {(): 0} | {path: node for node, path in enumerate(paths, start=1)}
    assert shape.topology.parents[1:] == tuple(node_of[path[:-1]] for path in paths)
    assert list(shape.ranks[1:]) == [path[-1] for path in paths]
