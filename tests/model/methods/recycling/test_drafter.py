"""Token Recycling: writing to the matrix, its order, and drafting from it.

Run: pytest tests/model/methods/recycling/test_drafter.py
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.drafter import VerifiedStep
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.engine.verification import Acceptance, verify
from model.methods import drafter_class
from model.methods.recycling.adjacency import MOST_AVERAGED, AdjacencyMatrix
from model.methods.recycling.drafter import (
    AveragedRecyclingConfig,
    RecyclingConfig,
    RecyclingDrafter,
)
from tests.model.decoded import drafter_for, random_ids, referee, target_of

CPU = torch.device("cpu")
VOCAB = 10


@pytest.fixture
def template(tmp_path: Path) -> str:
    """A template of six nodes for k = 2."""
    file = tmp_path / "small.json"
    file.write_text("[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]", encoding="utf-8")
    return str(file)


def drafter(template: str, **options: Any) -> RecyclingDrafter:
    """Return a drafter with k = 2."""
    config = RecyclingConfig(output_id_topk=2, tree_version=template, **options)
    return RecyclingDrafter(config, VOCAB, CPU)


def logits_for(best: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return logits whose two best tokens are given, for each node."""
    logits = torch.zeros(len(best), VOCAB)
    for node, (first, second) in enumerate(best):
        logits[node, first], logits[node, second] = 2.0, 1.0
    return logits


def step(path: list[int], stop_reason: str | None = None, num_tokens: int = 0) -> VerifiedStep:
    """Return a step over five nodes; nodes 0, 2 and 4 hold token 3, nodes 1 and 3 token 5."""
    tokens = [3, 5, 3, 5, 3]
    tree = DraftTree.from_lists(tokens, (-1, 0, 0, 1, 1))
    logits = logits_for([(1, 2), (3, 4), (5, 6), (7, 8), (9, 0)])
    emitted = [0] * (num_tokens or len(path))
    candidates = verify(tree, logits, num_candidates=2).candidates
    predictions = [likeliest for likeliest, _ in candidates.token_ids]
    acceptance = Acceptance(path, emitted, tokens, predictions, candidates)
    return VerifiedStep(tree, acceptance, stop_reason)


def rows(of: RecyclingDrafter) -> dict[int, list[int]]:
    """Return the rows that are not empty."""
    matrix = of.memory()["adjacency"].tolist()
    return {token: row for token, row in enumerate(matrix) if any(row)}


def test_the_tree_is_filled_level_by_level_from_the_matrix(template: str) -> None:
    recycling = drafter(template, policy="accepted-last")
    matrix = torch.zeros(VOCAB, 2, dtype=torch.int32)
    for token, row in {1: (2, 3), 2: (4, 5), 3: (6, 7), 4: (8, 9)}.items():
        matrix[token] = torch.tensor(row)
    recycling.load_memory({"adjacency": matrix})
    tree = recycling.propose([0, 1], DraftBudget(10))
    # paths:                         [0] [1] [0,0] [0,1] [1,0] [0,0,0]
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 8]


def test_rows_never_seen_hold_token_zero(template: str) -> None:
    tree = drafter(template).propose([7], DraftBudget(10))
    assert tree.token_ids.tolist() == [7, 0, 0, 0, 0, 0, 0]


def test_the_accepted_path_is_written_last(template: str) -> None:
    recycling = drafter(template, policy="accepted-last")
    recycling.observe(step(path=[0, 1]))
    # Token 3: nodes 2 and 4 were rejected, the root is true. Token 5: node 3 rejected, 1 accepted.
    assert rows(recycling) == {3: [1, 2], 5: [3, 4]}


def test_of_rejected_nodes_the_later_wins(template: str) -> None:
    recycling = drafter(template, policy="accepted-last")
    recycling.observe(step(path=[0]))
    assert rows(recycling) == {3: [1, 2], 5: [7, 8]}


def test_the_published_policy_writes_in_tree_order(template: str) -> None:
    recycling = drafter(template, policy="original")
    recycling.observe(step(path=[0, 1]))
    assert rows(recycling) == {3: [9, 0], 5: [7, 8]}


@pytest.mark.parametrize(
    ("stop_reason", "num_tokens", "is_written"),
    [(None, 2, True), ("length", 2, False), ("eos", 2, True), ("eos", 1, False)],
)
def test_the_published_policy_writes_no_row_in_the_step_that_stops_it(
    template: str, stop_reason: str | None, num_tokens: int, is_written: bool
) -> None:
    # An end token as bonus token stops after the update, one among the drafts before it.
    recycling = drafter(template, policy="original")
    recycling.observe(step([0, 1], stop_reason, num_tokens))
    assert bool(rows(recycling)) == is_written


def test_rejected_nodes_write_nothing_if_so_asked(template: str) -> None:
    recycling = drafter(template, policy="accepted-only")
    recycling.observe(step(path=[0]))
    assert rows(recycling) == {3: [1, 2]}


@pytest.mark.parametrize("tree_version", ["small", "auto"])
def test_half_of_an_averaged_row_stays(tree_version: str, template: str) -> None:
    recycling = drafter(template if tree_version == "small" else "auto", policy="average")
    recycling.start([3])
    recycling.observe_prompt([4], logits_for([(1, 2)]))
    assert rows(recycling) == {4: [1, 2]}, "of a first row all"
    # Of 0.73 and 0.27, which auto keeps as 0.67 and 0.25.
    recycling.observe_prompt([4], logits_for([(3, 1)]))
    assert rows(recycling) == {4: [1, 3]}, "0.73 + 0.27 and 0.73; 0.27 is the third"
    recycling.observe_prompt([4], logits_for([(3, 5)]))
    assert rows(recycling) == {4: [3, 1]}, "0.42 + 0.73 and 0.58; 0.27 is the third"


def test_the_default_is_as_published_and_automatic_trees_average(template: str) -> None:
    assert RecyclingConfig(tree_version=template, output_id_topk=2).policy == "original"
    assert RecyclingConfig(tree_version="auto").policy == "average"
    named = drafter_class("recycling-averaged").config_class
    assert named().policy == named(tree_version="auto").policy == "average"
    assert named() == AveragedRecyclingConfig() and named().harvest_prompt
    assert drafter_class("recycling").config_class() == RecyclingConfig(policy="original")


def test_a_token_that_comes_often_is_averaged_over_its_last_times(template: str) -> None:
    recycling = drafter(template, policy="average")
    best = [(6, 7), (1, 2), (1, 2), (3, 2), (1, 2)]
    recycling.observe_prompt([4] * 5, logits_for(best))
    alone = drafter(template, policy="average")
    for first_and_second in best[-MOST_AVERAGED:]:
        alone.observe_prompt([4], logits_for([first_and_second]))
    assert rows(recycling) == rows(alone)
    shares = [of.memory()["shares"][4] for of in (recycling, alone)]
    assert torch.equal(*shares) and shares[0].sum() == pytest.approx(1)


def test_averages_are_those_of_a_plain_reference() -> None:
    source = random.Random(0)
    k, vocab = 3, 9
    matrix = AdjacencyMatrix(vocab, k, CPU, is_average=True)
    expected: dict[int, list[tuple[int, float]]] = {}
    for _ in range(300):
        tokens = source.sample(range(vocab), source.randrange(1, vocab))
        found = [source.sample(range(vocab), k) for _ in tokens]
        logits = [sorted((source.gauss(0, 2) for _ in range(k)), reverse=True) for _ in tokens]
        matrix.write(tokens, found, logits)
        for token, row, values in zip(tokens, found, logits, strict=True):
            total = sum(map(math.exp, values))
            shares = dict(expected.get(token, []))
            for successor, value in zip(row, values, strict=True):
                shares[successor] = shares.get(successor, 0.0) + math.exp(value) / total
            best = sorted(shares.items(), key=lambda item: -item[1])[:k]
            whole = sum(share for _, share in best)
            expected[token] = [(successor, share / whole) for successor, share in best]
    assert matrix.shares is not None and len(expected) == vocab
    for token, row in expected.items():
        assert matrix.successors.host[token].tolist() == [successor for successor, _ in row]
        shares = [share for _, share in row]
        assert matrix.shares.host[token].tolist() == pytest.approx(shares, abs=1e-5)


@pytest.mark.parametrize("stop_reason", ["eos", "length", "context"])
def test_averaged_rows_learn_from_the_last_step_too(template: str, stop_reason: str) -> None:
    recycling = drafter(template, policy="average")
    recycling.observe(step([0, 1], stop_reason))
    assert rows(recycling)


def test_prompt_tokens_are_written_in_order(template: str) -> None:
    recycling = drafter(template, policy="accepted-last")
    recycling.observe_prompt([4, 5, 4], logits_for([(1, 2), (3, 4), (5, 6)]))
    assert rows(recycling) == {4: [5, 6], 5: [3, 4]}


@pytest.mark.parametrize(
    ("options", "is_harvested"),
    [
        ({}, False),
        ({"policy": "average"}, True),
        ({"policy": "average", "harvest_prompt": False}, False),
        ({"policy": "accepted-last", "harvest_prompt": True}, True),
    ],
)
def test_the_prompt_is_harvested_unless_told_otherwise(
    options: dict[str, Any], is_harvested: bool
) -> None:
    target = target_of("Llama, grouped heads")
    recycling = drafter_for("recycling", target, **options)
    assert recycling.needs.prompt_logits == is_harvested
    prompt = list(range(40, 60))
    generate(target, recycling, prompt, max_new_tokens=1)
    seen = recycling.memory()["adjacency"].any(dim=1).nonzero().flatten().tolist()
    assert set(prompt[:-1]).issubset(seen) == is_harvested


@pytest.mark.parametrize("k", [2, 16])
def test_other_numbers_of_successors_are_lossless(k: int, tmp_path: Path) -> None:
    target = target_of("Llama, grouped heads")
    file = tmp_path / "tree.json"
    file.write_text(str([[0], [k - 1], [0, k - 1], [k - 1, 0]]), encoding="utf-8")
    recycling = drafter_for("recycling", target, output_id_topk=k, tree_version=str(file))
    prompt = random_ids(12)
    answer = generate(target, recycling, prompt, max_new_tokens=40)
    assert answer.token_ids == referee(target, prompt, 40)
    assert recycling.memory()["adjacency"].shape == (target.vocab_size, k)


def test_start_cold_is_said_and_hot_is_the_default(template: str) -> None:
    assert drafter(template, start="cold", policy="average").needs.cold_start
    assert not drafter(template).needs.cold_start
    assert drafter(template).is_hot


def test_the_matrix_of_a_large_vocabulary_is_small() -> None:
    recycling = RecyclingDrafter(AveragedRecyclingConfig(), 32_000, CPU)
    matrix, shares = recycling.memory().values()
    assert (matrix.dtype, shares.dtype) == (torch.int32, torch.float32)
    for tensor in (matrix, shares):
        assert tensor.numel() * tensor.element_size() < 2 * 10**6
    assert "32000 x 8 int32 and float32: 1.95 MiB" in recycling.describe()


@pytest.mark.parametrize(
    ("matrix", "text"),
    [
        (torch.zeros(VOCAB, 3, dtype=torch.int32), "shape"),
        (torch.zeros(VOCAB - 1, 2, dtype=torch.int32), "shape"),
        (torch.zeros(VOCAB, 2), "int32"),
        (torch.full((VOCAB, 2), VOCAB, dtype=torch.int32), "outside the vocabulary"),
        (torch.full((VOCAB, 2), -1, dtype=torch.int32), "outside the vocabulary"),
    ],
)
def test_a_matrix_that_does_not_fit_is_refused(
    template: str, matrix: torch.Tensor, text: str
) -> None:
    recycling = drafter(template, policy="accepted-last")
    with pytest.raises(ValueError, match=text):
        recycling.load_memory({"adjacency": matrix})


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        (torch.zeros(VOCAB, 3), "shape"),
        (torch.zeros(VOCAB, 2, dtype=torch.float64), "float64"),
        (torch.full((VOCAB, 2), 1.5), "outside 0 to 1"),
        (torch.full((VOCAB, 2), float("nan")), "outside 0 to 1"),
    ],
)
def test_shares_that_do_not_fit_are_refused(template: str, shares: torch.Tensor, text: str) -> None:
    matrix = torch.zeros(VOCAB, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=text):
        drafter(template, policy="average").load_memory({"adjacency": matrix, "shares": shares})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"output_id_topk": 0}, "output_id_topk: got 0"),
        ({"policy": "none"}, "policy: got 'none'"),
        ({"start": "warm"}, "start: got 'warm'"),
        ({"tree_version": "9.9"}, "tree_version"),
        ({"harvest_prompt": True}, "never harvests; allowed: .* the method recycling-averaged"),
        ({"start": "cold"}, "never resets; allowed: .* the method recycling-averaged"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RecyclingConfig(**options)


def test_more_successors_than_tokens_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match="allowed: 1 to 1, the vocabulary"):
        RecyclingDrafter(RecyclingConfig(output_id_topk=2, tree_version=template), 1, CPU)
