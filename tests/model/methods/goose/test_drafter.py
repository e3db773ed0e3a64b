"""Goose drafts what a hand-made trace says, and its tree keeps to the numbers that the options give.

The trace is worked out from the authors' code (github.com/2kinto/GOOSE_Speculative_Decoding, goose/decoding.py,
tree.py, context_match.py and adjacency.py).

Run: pytest tests/model/methods/goose/test_drafter.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.drafter import VerifiedStep
from model.engine.read_out import Candidates
from model.engine.tree import DraftTree
from model.engine.verification import Acceptance
from model.methods.goose.drafter import LEAST_SHARE, GooseConfig, GooseDrafter, falling_shares
from model.methods.goose.sources import NONE, SuccessorTable
from tests.model.decoded import option_names

CPU = torch.device("cpu")
VOCAB = 50
# Shares 0.67, 0.24 and 0.09.
LOGITS = [2.0, 1.0, 0.0]
NO_LIMIT = DraftBudget(1000)


def drafter(**options: Any) -> GooseDrafter:
    """Return a drafter."""
    return GooseDrafter(GooseConfig(**options), VOCAB, CPU)


def small() -> GooseDrafter:
    """Return a drafter of trees of eight nodes, the root included, that copies two tokens at a time."""
    return drafter(num_nodes=7, max_extended_chain=7, max_chain=2, output_id_topk=3)


def drafted(goose: GooseDrafter, text: list[int], budget: DraftBudget = NO_LIMIT) -> DraftTree:
    """Return the draft after a text."""
    tree = goose.propose(text, budget)
    tree.topology.check(budget.max_depth, budget.chain_only, goose.max_nodes)
    return tree


def nodes(tree: DraftTree) -> list[tuple[int, int]]:
    """Return the token and the parent of every node."""
    return list(zip(tree.token_ids.tolist(), tree.topology.parents, strict=True))


def verified(
    goose: GooseDrafter,
    text: list[int],
    tree: DraftTree,
    path: list[int],
    bonus: int,
    rows: Sequence[Sequence[int]],
) -> None:
    """Let a drafter observe a step with these likeliest tokens after every node; the text grows."""
    tokens = tree.token_ids.tolist()
    emitted = [*(tokens[node] for node in path[1:]), bonus]
    candidates = Candidates([list(row) for row in rows], [LOGITS for _ in rows])
    predictions = [row[0] for row in rows]
    acceptance = Acceptance(path, emitted, tokens, predictions, candidates)
    goose.observe(VerifiedStep(tree, acceptance, None))
    text += emitted


def test_a_hand_made_trace() -> None:
    goose = small()
    text = [1, 2, 3, 9, 1, 2, 3]
    goose.start(text)

    # The table is empty, so that the chain is drafted alone: 1 2 3 went on with 9 1 (two tokens a match).
    tree = drafted(goose, text)
    assert nodes(tree) == [(3, -1), (9, 0), (1, 1)]
    verified(goose, text, tree, [0, 1], 5, [[9, 4, 6], [5, 1, 6], [2, 4, 8]])

    # 3 9 5 is new and 5 has no row: a plain step.
    tree = drafted(goose, text)
    assert nodes(tree) == [(5, -1)]
    verified(goose, text, tree, [0], 1, [[1, 9, 3]])

    # No match; 5 1 has no row, but 1 has one of step 1. Seven nodes are allowed and only three known: 2, 4
    # and 8 have no rows.
    tree = drafted(goose, text)
    assert nodes(tree) == [(1, -1), (2, 0), (4, 0), (8, 0)]
    verified(goose, text, tree, [0, 1], 3, [[2, 9, 5], [3, 5, 9], [9, 7, 2], [6, 7, 9]])

    # 1 2 3 occurred twice, each time before 9: full confidence, the chain 9 1 is looked up further. 1 2 3 9 1
    # occurred once, before 2 3: that is added, and is the last look-up for want of full confidence. Three of
    # eight nodes are left: int(3 / 2) for the spine, at its first node, and two for the root. The row of 2 3
    # (step 1; a root's pair is written after a chain) has 9, which is drafted, 4 and 6; that of 3 9 has 5.
    tree = drafted(goose, text)
    spine = [(3, -1), (9, 0), (1, 1), (2, 2), (3, 3)]
    assert nodes(tree) == [*spine, (4, 0), (6, 0), (5, 1)]
    assert tree.sources == ("text",) * 5 + ("rows",) * 3
    rows = [[9, 4, 7], [5, 1, 6], [2, 4, 8], [3, 5, 9], [9, 6, 7], [1, 2, 3], [1, 2, 3], [1, 7, 3]]
    verified(goose, text, tree, [0, 1, 7], 1, rows)

    # 2 3 9 5 1 occurred once, before 2 3: two of eight nodes have confidence 0.6 * 2 / 8 = 0.15. Five are
    # left, int(5 / 2) = 2 for the spine, one a node, and three for the root, whose row has two beside 2: that of
    # 1 alone, of step 4, since a root's pair (5 1 of step 3) is not written after a tree. The row of 1 2 has 5
    # beside 3; 2 3, the end of the spine, goes on with 9. The eighth node grows from the first branch, 4, by
    # the row of 1 4.
    tree = drafted(goose, text)
    assert nodes(tree) == [(1, -1), (2, 0), (3, 1), (4, 0), (8, 0), (5, 1), (9, 2), (9, 3)]


def test_a_rejected_spine_leaves_its_nodes_to_the_branches() -> None:
    goose = drafter(num_nodes=19, max_extended_chain=1, max_chain=10, output_id_topk=3)
    text = [*range(1, 7), 20, *range(1, 6)]
    goose.start(text)
    goose._table.write([NONE], [5], [[30, 31, 32]], [LOGITS])
    # Ten tokens from one occurrence: 6, 20, 1, ..., 5 are seven, confidence 0.6 * 7 / 8. Of 20 nodes the spine
    # may take half, and by confidence of the other half as well.
    tree = drafted(goose, text)
    assert (tree.sources or ()).count("text") == 1 + 7
    assert goose._limits(7 / 8 * 0.6, 99).num_spine == int(20 * (0.5 + 7 / 8 * 0.6 * 0.5))
    spines = []
    for _ in range(5):
        verified(goose, list(text), tree, [0], 30, [[30, 31, 32]] * tree.topology.num_nodes)
        spines.append(goose._limits(0.0, 99).num_spine)
    # The rate falls from 0.5 by the factor 0.7 a step: 0.35, 0.245, 0.17, ...
    assert spines == [6, 6, 3, 3, 3]
    assert goose._rate == pytest.approx(0.5 * 0.7**5)
    goose.start(text)
    assert goose._limits(0.0, 99).num_spine == 10


@pytest.mark.parametrize("seed", range(40))
def test_drafts_keep_to_their_limits(seed: int) -> None:
    source = random.Random(seed)
    num_nodes, longest = source.choice([(1, 1), (8, 8), (8, 30), (59, 100), (64, 20)])
    goose = drafter(num_nodes=num_nodes, max_extended_chain=longest, output_id_topk=5)
    text = [source.randrange(8) for _ in range(60)]
    goose.start(text)
    goose.observe_prompt(text[:-1], torch.rand(len(text) - 1, VOCAB))
    largest = 0
    for _ in range(10):
        budget = DraftBudget(source.choice([0, 1, 3, 1000]), chain_only=source.random() < 0.3)
        tree = drafted(goose, text, budget)
        largest = max(largest, tree.topology.num_nodes)
        siblings = list(zip(tree.topology.parents, tree.token_ids.tolist(), strict=True))
        assert len(set(siblings)) == len(siblings), "no guess twice"
        path = tree.topology.path_to(source.randrange(tree.topology.num_nodes))
        rows = [source.sample(range(8), 5) for _ in siblings]
        tokens = tree.token_ids.tolist()
        logits = Candidates(rows, [[4.0, 3.0, 2.0, 1.0, 0.0]] * len(rows))
        emitted = [*(tokens[node] for node in path[1:]), source.randrange(8)]
        acceptance = Acceptance(path, emitted, tokens, [row[0] for row in rows], logits)
        goose.observe(VerifiedStep(tree, acceptance, None))
        text += emitted
    assert 1 < largest <= 1 + max(num_nodes, longest) == goose.max_nodes


def test_a_chain_is_drafted_where_only_chains_are_verified() -> None:
    goose = small()
    text = [1, 2, 3, 9, 1, 2, 3]
    goose.start(text)
    goose.observe_prompt(text[:-1], torch.eye(VOCAB)[torch.tensor([2, 3, 9, 1, 2, 3])] * 20)
    tree = drafted(goose, text, DraftBudget(9, chain_only=True))
    assert nodes(tree) == [(3, -1), (9, 0), (1, 1)], "from the text"
    goose.start([9, 1])
    tree = drafted(goose, [9, 1], DraftBudget(3, chain_only=True))
    assert nodes(tree) == [(1, -1), (2, 0), (3, 1), (9, 2)], "from the table"


def test_a_pair_of_chunks_is_known_too() -> None:
    goose = drafter(output_id_topk=2)
    goose.start([1, 2, 3, 4])
    for token in (1, 2, 3):  # a chunk each
        goose.observe_prompt([token], torch.eye(VOCAB)[[token + 1]])
    keys = goose.memory()["keys"].tolist()
    assert sorted(keys) == [[NONE, 1], [NONE, 2], [NONE, 3], [1, 2], [2, 3]]


def test_of_equal_tokens_the_last_row_stays_with_its_own_shares() -> None:
    table = SuccessorTable(2)
    table.write([NONE, 5, 6], [7, 7, 7], [[1, 2], [3, 4], [8, 9]], [[0.0, 0.0], [1, 0], [40, 0]])
    assert table.after(NONE, 7) == table.after(6, 7) == table.after(30, 7)
    assert [token for token, _ in table.after(6, 7)] == [8, 9]
    assert table.after(6, 7)[0][1] == pytest.approx(1.0)
    assert [token for token, _ in table.after(5, 7)] == [3, 4]
    assert table.after(5, 7)[1][1] == pytest.approx(0.2689, abs=1e-4)


def test_unlikely_successors_are_not_drafted() -> None:
    goose = drafter(output_id_topk=2)
    goose.start([5])
    goose._table.write([NONE], [5], [[1, 2]], [[10.0, 0.0]])
    assert goose._table.after(NONE, 5)[1][1] < LEAST_SHARE
    assert nodes(drafted(goose, [5])) == [(5, -1), (1, 0)]


def test_falling_shares_are_spent_from_the_front() -> None:
    assert falling_shares(12, 3) == [6, 3, 2]
    assert falling_shares(2, 4) == [1, 1, 0, 0]
    assert falling_shares(0, 2) == [0, 0]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("keys", torch.zeros(2, 2, dtype=torch.int64), "a key twice"),
        ("ids", torch.full((2, 2), VOCAB, dtype=torch.int32), "outside the vocabulary"),
        ("shares", torch.full((2, 2), 2.0), "shares outside 0 to 1"),
        ("ids", torch.zeros(2, 3, dtype=torch.int32), "allowed: .*int32"),
    ],
)
def test_rows_that_do_not_fit_are_refused(name: str, tensor: torch.Tensor, message: str) -> None:
    goose = drafter(output_id_topk=2)
    goose._table.write([NONE, NONE], [3, 4], [[1, 2], [1, 2]], [[1, 0], [1, 0]])
    memory = goose.memory()
    goose.load_memory(memory)
    with pytest.raises(ValueError, match=message):
        goose.load_memory(memory | {name: tensor})


def test_its_documented_options_keep_their_names() -> None:
    assert set(["--num-nodes", "--max-extended-chain", "--output-id-topk"]) <= option_names(
        GooseConfig
    )
