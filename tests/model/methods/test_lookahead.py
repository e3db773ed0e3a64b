"""Lookahead decoding: window and guesses form the tree of the paper's mask.

Run: pytest tests/model/methods/test_lookahead.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.budget.acceptance import FIRST_WAIT, LONGEST_WAIT
from model.engine.budget import CostCurve, DraftBudget
from model.engine.drafter import VerifiedStep
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.engine.verification import verify
from model.methods.lookahead.drafter import LookaheadConfig, LookaheadDrafter
from tests.model.decoded import drafter_for, random_ids, referee, target_of

CPU = torch.device("cpu")
VOCAB = 50
LEVEL, WINDOW = 5, 7
PROMPT = list(range(10, 40))  # no n-gram begins with the last token


def drafter(**options: Any) -> LookaheadDrafter:
    """Return a drafter."""
    return LookaheadDrafter(LookaheadConfig(**options), VOCAB, CPU)


def observed(lookahead: LookaheadDrafter, tree: DraftTree, seed: int) -> int:
    """Let a drafter observe a step with random logits; return the emitted token."""
    logits = torch.randn(
        tree.topology.num_nodes, VOCAB, generator=torch.Generator().manual_seed(seed)
    )
    acceptance = verify(tree, logits)
    lookahead.observe(VerifiedStep(tree, acceptance, None))
    return acceptance.tokens[-1]


def full_window() -> tuple[LookaheadDrafter, DraftTree]:
    """Return a drafter after the steps that fill its window, and its draft without guesses."""
    lookahead = drafter()
    lookahead.start(PROMPT)
    for seed in range(LEVEL - 2):
        observed(lookahead, lookahead.propose(PROMPT, DraftBudget(99)), seed)
    return lookahead, lookahead.propose(PROMPT, DraftBudget(99))


def window_places() -> list[tuple[int, int]]:
    """Return (row, column) of every node of a full window: the root is column 0 of row 0."""
    first_row = [(0, column) for column in range(WINDOW)]
    return first_row + [(row, col) for row in range(1, LEVEL - 1) for col in range(WINDOW)]


def test_a_full_window_has_one_six_and_twenty_one_nodes() -> None:
    _, tree = full_window()
    assert tree.topology.num_nodes == 1 + (WINDOW - 1) + (LEVEL - 2) * WINDOW == 28


def test_positions_are_column_plus_row() -> None:
    _, tree = full_window()
    assert list(tree.topology.depths) == [row + column for row, column in window_places()]


def test_a_node_sees_its_column_and_the_first_row_up_to_it() -> None:
    _, tree = full_window()
    places = window_places()
    for node, (row, column) in enumerate(places):
        expected = {
            other
            for other, (r, c) in enumerate(places)
            if (r == 0 and c <= column) or (c == column and r <= row)
        }
        found = set(tree.topology.ancestor_mask[node].nonzero().flatten().tolist())
        assert found == expected, f"row {row}, column {column}"


def test_the_window_fills_row_by_row_losing_a_column_each() -> None:
    lookahead = drafter()
    lookahead.start(PROMPT)
    sizes = []
    for seed in range(LEVEL):
        tree = lookahead.propose(PROMPT, DraftBudget(99))
        sizes.append(tree.topology.num_nodes)
        observed(lookahead, tree, seed)
    # Row 0 starts with W + N - 3 columns beside the root.
    assert sizes[:4] == [1 + 9, 1 + 8 + 9, 1 + 7 + 2 * 8, 28]


def test_a_full_window_moves_on_and_gives_an_ngram_for_every_column() -> None:
    lookahead, tree = full_window()
    before = [list(row) for row in lookahead._rows]
    lookahead._pool.clear()
    logits = torch.randn(tree.topology.num_nodes, VOCAB, generator=torch.Generator().manual_seed(9))
    acceptance = verify(tree, logits)
    predictions = logits.argmax(dim=-1).tolist()[-WINDOW:]
    lookahead.observe(VerifiedStep(tree, acceptance, None))
    heads = [PROMPT[-1], *before[0]]
    for column, head in enumerate(heads):
        ngram = (*(row[column] for row in before[1:]), predictions[column])
        assert ngram in lookahead._pool[head]
    assert lookahead._rows == [before[1][1:], before[2], before[3], predictions]


def test_the_prompts_ngrams_are_guessed_as_chains_under_the_root() -> None:
    lookahead = drafter()
    text = [1, 2, 3, 4, 5, 6, 7, 1, 9, 8, 7, 6, 5, 1]
    lookahead.start(text)
    tree = lookahead.propose(text, DraftBudget(99))
    paths = {
        tuple(tree.token_ids[node].item() for node in tree.topology.path_to(leaf))
        for leaf in range(tree.topology.num_nodes)
    }
    assert {(1, 2, 3, 4, 5), (1, 9, 8, 7, 6)} <= paths


def test_the_pool_keeps_the_latest_of_each_token() -> None:
    lookahead = drafter(level=2, guess=3)
    # 5 is followed by 1, 2, 3, 1 again, 4: of three kept, the 2 is the oldest.
    lookahead.start([5, 1, 5, 2, 5, 3, 5, 1, 5, 4, 5])
    assert lookahead._pool[5] == [(3,), (1,), (4,)]


def test_a_budget_cuts_guesses_and_leaves_a_window_out_that_does_not_fit() -> None:
    lookahead = drafter()
    text = [1, 2, 3, 4, 5, 6, 7, 1]
    lookahead.start(text)
    assert lookahead.propose(text, DraftBudget(2)).token_ids.tolist() == [1, 2, 3]
    chain = lookahead.propose(text, DraftBudget(99, chain_only=True))
    assert chain.token_ids.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("options", [{"level": 2}, {"window": 1}, {"level": 2, "window": 1}, {}])
def test_every_shape_is_lossless_and_within_its_size(options: dict[str, int]) -> None:
    target = target_of("Llama, grouped heads")
    lookahead = drafter_for("lookahead", target, **options)
    prompt = random_ids(12) * 2
    answer = generate(target, lookahead, prompt, max_new_tokens=40)
    assert answer.token_ids == referee(target, prompt, 40)
    assert max(step.num_nodes for step in answer.steps) <= lookahead.max_nodes


@pytest.mark.parametrize("name", ["level", "window", "guess"])
def test_wrong_options_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: got 0; allowed:"):
        LookaheadConfig(**{name: 0})


def test_an_automatic_budget_drafts_only_while_it_pays_and_tries_again_ever_less_often() -> None:
    config = LookaheadConfig(budget="auto")
    lookahead = LookaheadDrafter(config, VOCAB, CPU)
    dear, cheap = CostCurve((1, 64), (1.0, 1.6)), CostCurve((1, 64), (1.0, 1.0))
    lookahead.start(list(range(20)))

    def sizes_of(cost_curve: CostCurve, count: int) -> list[int]:
        sizes = []
        for seed in range(count):
            tree = lookahead.propose([3], DraftBudget(99, cost_curve=cost_curve))
            sizes.append(tree.topology.num_nodes)
            observed(lookahead, tree, seed)  # random logits: next to nothing is accepted
        return sizes

    sizes = sizes_of(dear, 60)
    first_plain = sizes.index(1)
    assert 0 < first_plain < 50
    lookahead.start(list(range(20)))  # the next text knows as well
    sizes = sizes[first_plain:] + sizes_of(dear, 8 * LONGEST_WAIT)
    tries = [place for place, size in enumerate(sizes) if size > 1]
    waits = [later - earlier - 1 for earlier, later in zip([-1, *tries], tries, strict=False)]
    doubled = [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT, 8 * FIRST_WAIT]
    assert waits[:4] == doubled
    assert set(waits[4:]) == {LONGEST_WAIT}
    # Forgetting everything is a new beginning.
    lookahead.reset()
    assert sizes_of(dear, 60).index(1) == first_plain
    # Where drafts pay it forgets how often they did not.
    assert min(sizes_of(cheap, 5)) > 1
    sizes = sizes_of(dear, 2 + FIRST_WAIT)
    assert sizes.count(1) == 1 + FIRST_WAIT


def test_what_is_drafted_has_a_price_and_not_what_could_be() -> None:
    lookahead = LookaheadDrafter(LookaheadConfig(budget="auto"), VOCAB, CPU)
    assert lookahead.max_nodes > 64
    lookahead.start(list(range(20)))
    budget = DraftBudget(99, cost_curve=CostCurve((1, 16, 64), (1.0, 1.1, 2.5)))
    assert lookahead.propose([3], budget).topology.num_nodes > 1, "a window that begins"
