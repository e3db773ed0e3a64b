"""RACER drafts what the authors' code drafts, on a trace worked out by hand from its source.

Run: pytest tests/model/methods/racer/test_drafter.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.drafter import VerifiedStep
from model.engine.loop import generate
from model.engine.read_out import Candidates
from model.engine.tree import DraftTree
from model.engine.verification import Acceptance
from model.methods.racer.drafter import RacerConfig, RacerDrafter
from tests.model.decoded import drafter_for, option_names, random_ids, referee, target_of

VOCAB = 12
LLAMA = "Llama, grouped heads"
ROOMY = DraftBudget(50)


def drafter_of(**options: Any) -> RacerDrafter:
    """Return a drafter for a vocabulary of 12 tokens."""
    return RacerDrafter(RacerConfig(**options), VOCAB, torch.device("cpu"))


def logits_of(rows: list[list[int]]) -> torch.Tensor:
    """Return logits whose likeliest tokens are these, in falling order."""
    logits = torch.zeros(len(rows), VOCAB)
    for values, row in zip(logits, rows, strict=True):
        values[row] = torch.arange(len(row), 0, -1.0)
    return logits


def verified(tree: DraftTree, tokens: list[int], rows: list[list[int]]) -> VerifiedStep:
    """Return a step that emitted these tokens; the rows are the likeliest tokens after every node."""
    node_tokens, children = tree.token_ids.tolist(), tree.topology.children
    path = [0]
    for token in tokens[:-1]:
        path += [child for child in children[path[-1]] if node_tokens[child] == token]
    assert len(path) == len(tokens), "all but the last token were drafted"
    found = Candidates(rows, [[0.0] * len(row) for row in rows])
    predictions = [row[0] for row in rows]
    return VerifiedStep(tree, Acceptance(path, tokens, node_tokens, predictions, found), None)


def shape(tree: DraftTree) -> tuple[list[int], list[int]]:
    """Return the tokens and the parents of a draft."""
    return tree.token_ids.tolist(), list(tree.topology.parents)


def test_a_trace_of_the_authors_code() -> None:
    # File and functions: racer/automaton/src/automaton.cpp, evaluation/inference_racer.py.
    drafter = drafter_of(num_nodes=6, ngram=3, max_breadth=2)
    drafter.start([1, 2, 3, 1, 2, 4, 1, 2, 3, 9, 1])
    rows = {1: [2, 7], 2: [8, 5], 3: [9, 6], 4: [1, 5], 9: [1, 6]}
    read = [1, 2, 3, 1, 2, 4, 1, 2, 3, 9]
    drafter.observe_prompt(read, logits_of([rows[token] for token in read]))

    # The state is that of the empty suffix, and a match of one token (root -> 1) is too short: all 7
    # nodes are TokenBin's. 1 has 2 and 7, with breadths of 2 and 1; 2 is followed by 8 and 5; 7, 8 and 5
    # were never read, so 0 follows: below 7 and, as the seventh node, below 8. Of siblings the newest
    # comes first.
    tree = drafter.propose([1], ROOMY)
    assert shape(tree) == ([1, 7, 2, 0, 5, 8, 0], [-1, 0, 0, 1, 2, 2, 5])

    # 2 is accepted. Of the two rows of token 0, that of the last node in the tree's order stays. The
    # n-grams 9 1 2 and 3 9 1 are counted, and the state goes to 1 2.
    step = verified(tree, [2, 3], [[2, 7], [10, 11], [3, 8], [0, 2], [4, 9], [5, 4], [0, 5]])
    drafter.observe(step)

    # 1 2 3 matches, and by the link of 1 2 also 2 3, which 1 and 9 followed. TokenBin grows into that: 9
    # is there, 6 is new; 9 is followed by 1 and 6, and 6, never read, by 0.
    tree = drafter.propose([3], ROOMY)
    assert shape(tree) == ([3, 6, 1, 9, 0, 6, 1], [-1, 0, 0, 0, 1, 3, 3])

    # 1 is accepted. No n-gram is longer than 1 2 3, and touch_prefix has set its link to the root, so
    # the state is that of 1, though 2 3 1 is in the trie.
    rows_now = {3: [1, 9], 6: [6, 6], 1: [2, 0], 9: [4, 4], 0: [0, 1]}
    tokens = tree.token_ids.tolist()
    drafter.observe(verified(tree, [1, 2], [rows_now[token] for token in tokens]))

    # So the match is 1 2 and not 3 1 2: 3 and 4 followed. TokenBin adds 8 after 2; 3 is followed by 1
    # and 9, and 8 by 5, the newest rows.
    tree = drafter.propose([2], ROOMY)
    assert shape(tree) == ([2, 8, 3, 4, 5, 9, 1], [-1, 0, 0, 0, 1, 2, 2])

    # Nothing is accepted: trans_tokens is not called, and 1 2 goes on with 7.
    rows_now |= {2: [7, 3], 8: [1, 1], 4: [5, 5], 1: [2, 3], 5: [0, 1]}
    tokens = tree.token_ids.tolist()
    drafter.observe(verified(tree, [7], [rows_now[token] for token in tokens]))
    tree = drafter.propose([7], ROOMY)
    # No state has 7 below it, so only TokenBin drafts, and the state stays at 1 2. 11 was never
    # read; 0 follows it. 10 and 11 come from the row of 7, and 0 is followed by 0: the newest row.
    assert shape(tree) == ([7, 11, 10, 0, 0, 0, 0], [-1, 0, 0, 1, 2, 3, 4])


def test_a_row_is_that_of_the_last_node_with_the_token() -> None:
    drafter = drafter_of(num_nodes=6, ngram=0, max_breadth=2)
    drafter.start([5])
    tree = drafter.propose([5], ROOMY)
    # No row is there: 0 follows, and 0 after it, which are one node a level: a chain of seven.
    assert shape(tree) == ([5, *[0] * 6], [-1, 0, 1, 2, 3, 4, 5])
    drafter.observe(verified(tree, [0, 9], [[0, 3], *[[1, 1]] * 5, [4, 6]]))
    tokens, _ = shape(drafter.propose([0], ROOMY))
    assert tokens[1:3] == [6, 4], "the deepest node was last, accepted or not"


def test_a_chain_goes_on_from_retrieval_with_the_likeliest_tokens() -> None:
    drafter = drafter_of(num_nodes=6, ngram=3, max_breadth=2)
    drafter.start([1, 2, 3, 9, 1])
    drafter.observe_prompt([1, 2, 3, 9], logits_of([[2, 7], [8, 5], [4, 6], [1, 6]]))
    tree = drafter.propose([1], DraftBudget(50))
    drafter.observe(verified(tree, [2], [[2, 7]] * tree.topology.num_nodes))
    tree = drafter.propose([2], DraftBudget(50, chain_only=True))
    # 1 2 was followed by 3, 3 by 4, and 4, never read, by 0; the last step says that 2 follows 0 and 2.
    assert shape(tree) == ([2, 3, 4, 0, 2, 2, 2], [-1, 0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("options", [{"ngram": 0}, {"max_breadth": 0}, {"num_nodes": 1}, {}])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_every_draft_fits_its_options_and_its_budget(options: dict[str, int], depth: int) -> None:
    target = target_of(LLAMA)
    drafter = drafter_for("racer", target, **options)
    generate(target, drafter, random_ids(20), max_new_tokens=60)
    for is_chain in (False, True):
        for token in range(20):
            budget = DraftBudget(depth, is_chain)
            tree = drafter.propose([token], budget)
            tree.topology.check(budget.max_depth, budget.chain_only, drafter.max_nodes)
            assert tree.topology.num_nodes <= 1 + options.get("num_nodes", 63)


@pytest.mark.parametrize("options", [{"ngram": 0}, {"max_breadth": 0}, {"max_nodes": 30}])
def test_the_text_is_that_of_plain_decoding(options: dict[str, int]) -> None:
    target = target_of(LLAMA)
    drafter = drafter_for("racer", target, **options)
    for seed in (1, 2, 2):  # the last one repeats what was counted
        prompt = random_ids(20, seed)
        answer = generate(target, drafter, prompt, max_new_tokens=40)
        assert answer.token_ids == referee(target, prompt, 40)
    assert len(answer.steps) < 40, "something is accepted"


def test_n_grams_and_rows_live_across_texts_until_reset() -> None:
    drafter = drafter_of(num_nodes=6, ngram=3, max_breadth=2)
    drafter.start([1, 2, 3, 9, 9])
    drafter.observe_prompt([1, 2, 3, 9], logits_of([[2, 7], [8, 5], [4, 6], [1, 6]]))
    drafter.start([1])
    hot = shape(drafter.propose([1], ROOMY))
    assert hot[0][1:3] == [7, 2]
    drafter.reset()
    drafter.start([1])
    assert shape(drafter.propose([1], ROOMY))[0] == [1, *[0] * 6]
    assert drafter.is_hot and not drafter_of(start="cold").is_hot


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_nodes": 0}, "num_nodes: got 0; allowed: 1 to"),
        ({"ngram": -1}, "ngram: got -1; allowed: 0 to"),
        ({"max_nodes": 10}, "max_nodes: got 10 with n-grams of 10 tokens; allowed: 11 or more"),
        ({"max_breadth": VOCAB + 1}, "max_breadth: got 13; allowed: 0 to 12, the vocabulary"),
        ({"start": "warm"}, "start: got 'warm'; allowed: hot, cold"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        drafter_of(**options)


def test_its_documented_options_keep_their_names() -> None:
    documented = {"--num-nodes", "--ngram", "--max-nodes", "--max-breadth", "--start"}
    assert documented <= option_names(RacerConfig)
