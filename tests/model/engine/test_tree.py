"""Draft trees: everything derived from the parents, and refusals.

Run: pytest tests/model/engine/test_tree.py
"""

from __future__ import annotations

import random

import pytest
import torch

from model.engine.tree import DraftTree, TreeTopology

CPU = torch.device("cpu")
RANDOM_TREES = [
    (-1, *(random.Random(seed).randrange(node) for node in range(1, 2 + seed % 23)))
    for seed in range(40)
]


def ancestors(parents: tuple[int, ...], node: int) -> list[int]:
    """Return a node and its ancestors, by walking up."""
    found = []
    while node != -1:
        found.append(node)
        node = parents[node]
    return found


@pytest.mark.parametrize("parents", RANDOM_TREES)
def test_everything_follows_from_walking_up(parents: tuple[int, ...]) -> None:
    topology = TreeTopology(parents)
    nodes = range(len(parents))
    assert topology.num_nodes == len(parents)
    for node in nodes:
        up = ancestors(parents, node)
        assert topology.depths[node] == len(up) - 1
        assert topology.path_to(node) == up[::-1]
        assert topology.ancestor_mask[node].nonzero().flatten().tolist() == sorted(up)
        assert topology.children[node] == tuple(n for n in nodes if parents[n] == node)
        assert topology.ranks[node] == sum(parents[n] == parents[node] for n in range(node))
    assert topology.max_depth == max(topology.depths)
    assert topology.is_chain == all(len(kids) <= 1 for kids in topology.children)


@pytest.mark.parametrize("parents", RANDOM_TREES[:5])
def test_tensors_say_what_the_tuples_say(parents: tuple[int, ...]) -> None:
    topology = TreeTopology(parents)
    assert topology.depth_tensor(CPU).tolist() == list(topology.depths)
    mask = topology.additive_mask(CPU, torch.float16)
    assert mask.dtype == torch.float16
    assert torch.equal(mask == 0, topology.ancestor_mask)
    assert set(mask[mask != 0].tolist()) <= {torch.finfo(torch.float16).min}
    assert topology.depth_tensor(CPU) is topology.depth_tensor(CPU), "built once"
    assert topology.additive_mask(CPU, torch.float16) is mask, "built once"


def test_equal_parents_share_one_topology() -> None:
    assert TreeTopology.from_parents((-1, 0, 0)) is TreeTopology.from_parents((-1, 0, 0))
    assert TreeTopology.chain(3) is TreeTopology.from_parents((-1, 0, 1))


def test_the_root_alone_is_a_chain_of_depth_zero() -> None:
    root = TreeTopology.chain(1)
    assert (root.num_nodes, root.max_depth, root.is_chain, root.children) == (1, 0, True, ((),))


@pytest.mark.parametrize(
    ("parents", "text"),
    [
        ((), "node 0 must be the root"),
        ((0,), "node 0 must be the root"),
        ((-1, 1), "node 1 has parent 1"),
        ((-1, 0, 3), "node 2 has parent 3"),
        ((-1, -1), "node 1 has parent -1"),
    ],
)
def test_parents_that_make_no_tree_are_named(parents: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TreeTopology(parents)


def test_trees_are_built_from_lists_and_chains() -> None:
    tree = DraftTree.from_lists([7, 8, 9], (-1, 0, 0))
    assert tree.token_ids.tolist() == [7, 8, 9] and tree.topology.parents == (-1, 0, 0)
    chain = DraftTree.chain([4, 5])
    assert chain.token_ids.dtype == torch.int64 and chain.topology.parents == (-1, 0)


def test_a_budget_refuses_what_exceeds_it() -> None:
    tree = TreeTopology((-1, 0, 0))
    tree.check(1, chain_only=False, max_nodes=3)
    TreeTopology.chain(3).check(2, chain_only=True, max_nodes=3)
    with pytest.raises(ValueError, match="depth 1; allowed: at most 0"):
        tree.check(0, chain_only=False, max_nodes=3)
    with pytest.raises(ValueError, match="branches"):
        tree.check(5, chain_only=True, max_nodes=3)
    with pytest.raises(ValueError, match="draft of 3 nodes; allowed: max_nodes=2"):
        tree.check(5, chain_only=False, max_nodes=2)
