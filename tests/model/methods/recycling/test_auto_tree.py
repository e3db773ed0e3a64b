"""The automatic tree: levels and probabilities of successors beside their ranks.

Run: pytest tests/model/methods/recycling/test_auto_tree.py
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from model.budget.best_first import CENTRES
from model.engine.budget import CostCurve, DraftBudget
from model.engine.tree import DraftTree
from model.engine.verification import verify
from model.methods.recycling.auto_tree import AutoTree
from tests.model.methods.recycling.reference_auto_tree import (
    AFTER_TOKEN,
    OF_ANSWER,
    OF_PROMPT,
    ReferenceRowGuesses,
    TextSoFar,
)

CPU = torch.device("cpu")
ONE_NODE = DraftBudget(1, cost_curve=CostCurve((1, 2), (1.0, 1.0)))
VOCAB = 50


def test_a_text_knows_where_it_named_a_token() -> None:
    text = TextSoFar()
    text.start([1, 2, 3])
    assert [text.level(9, token) for token in (1, 3, 4)] == [OF_PROMPT, OF_PROMPT, 0]
    assert text.level(2, 3) == AFTER_TOKEN
    text.append([4, 1])
    assert [text.level(9, token) for token in (1, 2, 4)] == [OF_ANSWER, OF_PROMPT, OF_ANSWER]
    assert [text.level(*pair) for pair in ((3, 4), (4, 1))] == [AFTER_TOKEN] * 2
    assert text.level(1, 4) == OF_ANSWER, "not after this token"
    text.start([7])
    assert [text.level(3, token) for token in (1, 4)] == [0, 0], "another text"
    assert text.level(4, 1) == 0


@pytest.mark.parametrize("cls", [ReferenceRowGuesses, AutoTree])
def test_successors_that_the_text_named_are_told_apart(cls: type[AutoTree]) -> None:
    """If only these are accepted, the second of two successors is drafted once the text has named it."""
    guesses = cls(np.zeros((VOCAB, 2), dtype=np.int32), is_average=False)
    for root in range(20):
        pair = [20 + root, 21 + root]
        for named in pair:
            guesses.start([named, root])
            guesses.write([root], [pair], [[1.0, 0.9]])
            tree = guesses.grow(root, 63, DraftBudget(1, cost_curve=CostCurve((1, 3), (1.0, 1.0))))
            logits = torch.zeros(tree.topology.num_nodes, VOCAB)
            logits[0, named] = 1.0
            guesses.learn(verify(tree, logits, num_candidates=2), [])
    guesses.write([1], [[40, 41]], [[1.0, 0.9]])
    for prompt, expected in (([41, 1], 41), ([40, 1], 40)):
        guesses.start(prompt)
        assert guesses.grow(1, 63, ONE_NODE).token_ids.tolist() == [1, expected]


@pytest.mark.parametrize("cls", [ReferenceRowGuesses, AutoTree])
def test_a_tree_that_was_never_verified_is_forgotten(cls: type[AutoTree]) -> None:
    """A step that failed, and in the next text another drafter's chain, longer than the tree."""
    guesses = cls(np.zeros((VOCAB, 2), dtype=np.int32), is_average=False)
    guesses.start([5, 1])
    guesses.write([1], [[2, 3]], [[1.0, 0.9]])
    assert guesses.grow(1, 63, ONE_NODE).topology.num_nodes == 2
    before = guesses.memory()["rates"]
    guesses.start([6, 7])
    chain = DraftTree.chain(range(7, 40))
    logits = torch.eye(VOCAB)[8:41]
    acceptance = verify(chain, logits, num_candidates=2)
    assert len(acceptance.path) == 33
    guesses.learn(acceptance, [])
    assert torch.equal(guesses.memory()["rates"], before)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda codes: codes[:, :1], r"got codes torch.uint8 of shape \[50, 1\]"),
        (lambda codes: codes.int(), "got codes torch.int32"),
        (lambda codes: codes + len(CENTRES), f"a code above {len(CENTRES)}"),
        (
            lambda codes: codes * torch.tensor([1, 0], dtype=torch.uint8),
            "some successors but not all",
        ),
    ],
)
def test_codes_that_do_not_fit_are_refused(
    spoil: Callable[[torch.Tensor], torch.Tensor], expected: str
) -> None:
    guesses = AutoTree(np.zeros((VOCAB, 2), dtype=np.int32), True)
    guesses.write([1], [[2, 3]], [[1.0, 0.9]])
    memory = {name: tensor.clone() for name, tensor in guesses.memory().items()}
    with pytest.raises(ValueError, match=expected):
        guesses.load_memory({**memory, "codes": spoil(memory["codes"])})
    guesses.load_memory(memory)
    assert torch.equal(guesses.memory()["codes"], memory["codes"])
