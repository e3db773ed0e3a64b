"""Draft trees for SGLang, and what verified logits teach them. Not run in the engine."""

from __future__ import annotations

import numpy as np
import torch
from token_recycling_sglang.trees import RecycledTrees

VOCAB, K, NODES = 20, 3, 6


def trees_of(tokens: np.ndarray, masks: np.ndarray) -> list[list[tuple[int, ...]]]:
    """Return the path of every node, the root's token first."""
    tokens = tokens.reshape(-1, NODES)
    return [
        [tuple(tree[mask].tolist()) for mask in tree_masks]
        for tree, tree_masks in zip(tokens, masks.reshape(-1, NODES, NODES), strict=True)
    ]


def taught(table: dict[int, list[float]]) -> RecycledTrees:
    """Return trees that have seen these logits after these tokens."""
    trees = RecycledTrees(VOCAB, K, NODES)
    for token, logits in table.items():
        trees.batch_get(["a"], [[token]], [1])
        rows = torch.full((NODES, VOCAB), -10.0)
        rows[0, : len(logits)] = torch.tensor(logits)
        trees.observe(rows, torch.tensor([0] * NODES), torch.tensor([1]))
        trees._tokens[1:] = VOCAB + 1  # the other nodes teach nothing
        trees.synchronize()
    return trees


def test_every_tree_has_its_nodes_and_parents_before_children():
    trees = RecycledTrees(VOCAB, K, NODES)
    tokens, masks = trees.batch_get(["a", "b"], [[1, 2], [7]], [2, 1])
    assert tokens.shape == (2 * NODES,) and tokens.dtype == np.int64
    assert masks.shape == (2 * NODES * NODES,) and masks.dtype == bool
    assert tokens[0] == 2 and tokens[NODES] == 7
    for mask in masks.reshape(2, NODES, NODES):
        assert mask.diagonal().all() and not np.triu(mask, 1).any() and mask[:, 0].all()
    for paths in trees_of(tokens, masks):
        assert len(set(paths)) == NODES


def test_the_likeliest_nodes_are_drafted():
    trees = taught({1: [0.0, 0.0, 3.0, 2.0], 2: [4.0, 0.0, 0.0, 1.0], 0: [0.0, 5.0]})
    tokens, masks = trees.batch_get(["a"], [[1]], [1])
    paths = trees_of(tokens, masks)[0]
    assert paths[:4] == [(1,), (1, 2), (1, 2, 0), (1, 2, 0, 1)]


def test_rows_of_emitted_tokens_are_written_last():
    trees = RecycledTrees(VOCAB, K, 3)
    trees._parents = [[-1, 0, 0]]
    trees._tokens = np.array([5, 5, 6])
    logits = torch.zeros(3, VOCAB)
    logits[0, 5], logits[1, 9], logits[2, 8] = 9.0, 9.0, 9.0
    trees.observe(logits, torch.tensor([5, 9, 0]), torch.tensor([2]))
    trees.synchronize()
    assert trees._successors[5, 0] == 9  # of node 1, which is on the path after the root
    assert trees._successors[6, 0] == 8


def test_the_next_tree_of_a_text_follows_what_was_verified():
    trees = RecycledTrees(VOCAB, K, NODES)
    rng = np.random.default_rng(0)
    after = rng.permutation(VOCAB)  # the model: one token after each
    text = [3]
    num_steps = 0
    while len(text) < 60:
        tokens, masks = trees.batch_get(["a"], [text], [len(text)])
        trees.synchronize()
        logits = torch.zeros(NODES, VOCAB)
        logits[torch.arange(NODES), torch.from_numpy(after[tokens])] = 5.0
        paths = trees_of(tokens, masks)[0]
        emitted = [int(after[text[-1]])]
        while (text[-1], *emitted) in paths:
            emitted.append(int(after[emitted[-1]]))
        padded = (emitted + [0] * NODES)[:NODES]
        trees.observe(logits, torch.tensor(padded), torch.tensor([len(emitted)]))
        text += emitted
        num_steps += 1
    assert num_steps < 40
    trees.reset()
    assert not trees._shares.any()


def test_a_batch_that_was_not_drafted_teaches_nothing():
    trees = RecycledTrees(VOCAB, K, NODES)
    trees.observe(torch.zeros(2, VOCAB), torch.tensor([1, 2]), torch.tensor([1, 1]))
    trees.synchronize()
    assert not trees._shares.any()
