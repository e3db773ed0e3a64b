"""Verification accepts exactly what plain decoding would have emitted.

Run: pytest tests/model/engine/test_verification.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from model.engine.read_out import joined_read_out, logit_samples_of, read_out, split_read_out
from model.engine.rules import GreedyRule, SamplingRule
from model.engine.tree import DraftTree
from model.engine.verification import Acceptance, InvalidLogitsError, verify

CPU = torch.device("cpu")
VOCAB = 4  # small, so that siblings repeat tokens and paths are long


def random_case(seed: int) -> tuple[DraftTree, torch.Tensor]:
    """Return a random tree, and logits that agree along equal paths of tokens as a model's would."""
    source = random.Random(seed)
    num_nodes = 1 + seed % 17
    parents = (-1, *(source.randrange(node) for node in range(1, num_nodes)))
    tree = DraftTree.from_lists([source.randrange(VOCAB) for _ in parents], parents)
    tokens = tree.token_ids.tolist()
    rows = []
    for node in range(num_nodes):
        text = tuple(tokens[step] for step in tree.topology.path_to(node))
        generator = torch.Generator().manual_seed(hash((seed, text)) % 2**31)
        rows.append(torch.randn(VOCAB, generator=generator))
    return tree, torch.stack(rows)


def slow_paths(tree: DraftTree, predictions: Sequence[int]) -> list[list[int]]:
    """Return every path from the root whose tokens are all predicted, by trying all of them."""
    tokens = tree.token_ids.tolist()
    paths = [tree.topology.path_to(node) for node in range(tree.topology.num_nodes)]
    return [path for path in paths if all(tokens[b] == predictions[a] for a, b in pairwise(path))]


@pytest.mark.parametrize("seed", range(200))
def test_greedy_verification_takes_the_longest_right_path(seed: int) -> None:
    tree, logits = random_case(seed)
    predictions = logits.argmax(dim=-1).tolist()
    # max keeps the first among equals: the one that branches off first.
    best = max(sorted(slow_paths(tree, predictions)), key=len)
    tokens = tree.token_ids.tolist()
    expected = [*(tokens[node] for node in best[1:]), predictions[best[-1]]]
    accepted = verify(tree, logits, num_candidates=2)
    assert accepted == Acceptance(best, expected, tokens, predictions, accepted.candidates)
    top = logits.topk(2)
    assert accepted.candidates.token_ids == top.indices.tolist()
    # In sixteenths, as drafters get them.
    assert accepted.candidates.logits == [
        [round(16 * one) / 16 for one in row] for row in top.values.tolist()
    ]


@pytest.mark.parametrize("seed", range(60))
def test_text_ends_at_the_first_end_token_and_at_the_limit(seed: int) -> None:
    tree, logits = random_case(seed)
    whole = verify(tree, logits)
    for limit in range(1, len(whole.tokens) + 2):
        cut = verify(tree, logits, max_tokens=limit)
        assert cut.tokens == whole.tokens[:limit]
        assert cut.path == whole.path[: limit + 1]
    for eos in range(VOCAB):
        ended = verify(tree, logits, eos_ids={eos})
        end = whole.tokens.index(eos) + 1 if eos in whole.tokens else len(whole.tokens)
        assert ended.tokens == whole.tokens[:end]
        text = [ended.node_tokens[node] for node in ended.path[1:]]
        assert text == ended.tokens[: len(text)], "kept rows are rows of emitted tokens"


class Script:
    """A rule that takes the next token from a list and records its arguments."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.asked: list[tuple[list[float], list[int]]] = []

    def choose(self, logits: torch.Tensor, prefix: Sequence[int], tie_margin: float = 0.0) -> int:
        """Return the next token of the script."""
        self.asked.append((logits.tolist(), list(prefix)))
        return self.tokens.pop(0)


def test_a_rule_sees_the_logits_and_the_true_prefix_of_every_node() -> None:
    tree = DraftTree.from_lists([9, 1, 2, 1, 3], (-1, 0, 0, 2, 3))
    logits = torch.arange(20.0).reshape(5, 4)
    rule = Script([2, 1, 0])
    acceptance = verify(tree, logits, rule, prefix=[7, 9])
    assert acceptance.path == [0, 2, 3] and acceptance.tokens == [2, 1, 0]
    rows = [logits[node].tolist() for node in (0, 2, 3)]
    assert rule.asked == list(zip(rows, ([7, 9], [7, 9, 2], [7, 9, 2, 1]), strict=True))


def test_one_draw_is_made_for_each_emitted_token_and_none_beyond_the_end() -> None:
    tree = DraftTree.chain([0, 1, 1, 1])
    logits = torch.full((4, 2), -torch.inf)
    logits[:, 1] = 0
    for eos_ids, num_draws in (((), 4), ({1}, 1)):
        generator, twin = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        acceptance = verify(tree, logits, SamplingRule([], generator), [0], eos_ids)
        assert len(acceptance.tokens) == num_draws
        for _ in range(num_draws):
            SamplingRule([], twin).choose(logits[0], [0])
        assert torch.equal(generator.get_state(), twin.get_state())


def test_duplicate_siblings_are_all_followed() -> None:
    tree = DraftTree.from_lists([0, 1, 1, 2], (-1, 0, 0, 2))
    logits = torch.eye(4)[[1, 2, 2, 3]]
    acceptance = verify(tree, logits)
    assert acceptance.path == [0, 2, 3], "the second sibling has the longer path"
    assert acceptance.accepted_last(tree.topology) == [1, 0, 2, 3]


def test_rejected_nodes_are_learned_from_level_by_level_before_the_accepted_ones() -> None:
    tree = DraftTree.from_lists([0, 1, 2, 3, 1], (-1, 0, 1, 0, 3))
    acceptance = verify(tree, torch.eye(4)[[3, 0, 0, 0, 0]])
    assert acceptance.path == [0, 3]
    assert acceptance.accepted_last(tree.topology) == [1, 2, 4, 0, 3]
    swapped = DraftTree.from_lists([0, 1, 2, 3, 1], (-1, 0, 1, 0, 0))
    acceptance = verify(swapped, torch.eye(4)[[2, 0, 0, 0, 0]])
    assert acceptance.accepted_last(swapped.topology) == [1, 3, 4, 2, 0]


@pytest.mark.parametrize("num_candidates", [0, 8])
def test_equal_logits_go_to_the_first_as_in_plain_decoding(num_candidates: int) -> None:
    logits = torch.zeros(1, 50, dtype=torch.bfloat16)
    logits[0, 7:45] = 2.0
    tree = DraftTree.chain([0])
    assert verify(tree, logits, num_candidates=num_candidates).tokens == [7]


@pytest.mark.parametrize("rule", [None, GreedyRule([])])
@pytest.mark.parametrize("level", [100.0, -100.0])
def test_a_near_tie_is_left_open_at_any_level(level: float, rule: GreedyRule | None) -> None:
    logits = torch.tensor([[0.0, -1e-3, -50.0]]) + level
    tree = DraftTree.chain([0])
    assert not verify(tree, logits, rule, tie_margin=3e-5).is_decided
    assert verify(tree, logits, rule, tie_margin=3e-6).tokens == [0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_without_a_largest_number_are_refused_not_read(value: float) -> None:
    tree = DraftTree.chain([0, 1])
    logits = torch.eye(VOCAB)[[1, 2]]
    logits[1] = value
    with pytest.raises(InvalidLogitsError, match="allowed: a finite number"):
        verify(tree, logits)
    logits[0, 1], logits[0, 3] = 0.0, 1.0  # now the path ends before the broken node
    assert verify(tree, logits).tokens == [3]


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("with_samples", [False, True])
@pytest.mark.parametrize("num_candidates", [1, 3])
def test_what_travels_from_a_device_is_what_the_host_reads(
    num_candidates: int, with_samples: bool, has_tokens: bool
) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tree = DraftTree.from_lists([7, 1, 2, 3, 299], (-1, 0, 0, 1, 3))
    tokens, candidates, logit_samples, gaps = read_out(tree, logits, num_candidates, with_samples)
    assert (logit_samples is not None) == with_samples
    ids = tree.token_ids if has_tokens else None
    joined = joined_read_out(logits, num_candidates, with_samples, ids)
    found = split_read_out(tree, joined, num_candidates, has_tokens)
    assert found[:2] == (tokens, candidates) and found[3] == gaps
    largest = logits.topk(2).values
    expected = largest[:, 0] - largest[:, 1] if num_candidates > 1 else [torch.inf] * 5
    assert gaps == [float(one) for one in expected]
    if logit_samples is None:
        assert found[2] is None
    else:
        assert found[2] is not None and torch.equal(found[2], logit_samples)
        assert torch.equal(logit_samples, logit_samples_of(logits)) and torch.equal(
            logit_samples[:, 1], logits[:, 4].float()
        )


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min])
def test_ruled_out_tokens_are_no_measure_of_rounding(masked: float) -> None:
    """Otherwise a model that rules tokens out would decode every token twice under a processor."""
    rule = GreedyRule([lambda _, scores: scores / 1.05])
    logits = torch.tensor([3.0, 1.0, masked, masked])
    assert rule.choose(logits, [0], tie_margin=1e-4) == 0
    assert rule.choose(torch.tensor([3.0, 3.0 - 1e-5, masked]), [0], tie_margin=1e-4) is None
