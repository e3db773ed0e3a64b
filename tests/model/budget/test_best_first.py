"""Trees grow by probability, and rates are learned.

Run: pytest tests/model/budget/test_best_first.py
"""

from __future__ import annotations

import math
import random
from itertools import islice

import pytest
import torch

from model.budget.acceptance import AcceptanceRates
from model.budget.best_first import CENTRES
from model.engine.verification import verify
from tests.model.budget.reference_growth import Growth, Guess, probability_codes

CPU = torch.device("cpu")
Path = tuple[int, ...]


def random_guesses(seed: int) -> dict[Path, list[Guess]]:
    """Return guesses for every path of up to three tokens."""
    source = random.Random(seed)
    found: dict[Path, list[Guess]] = {}
    paths: list[Path] = [()]
    for path in paths:
        shares = sorted((source.random() * 0.5 for _ in range(source.randrange(4))), reverse=True)
        found[path] = [(share, token, token) for token, share in enumerate(shares)]
        if len(path) < 3:
            paths += [(*path, token) for token in range(len(shares))]
    return found


def grown(guesses: dict[Path, list[Guess]], max_depth: int, chain_only: bool = False) -> Growth:
    """Return a growth over these guesses."""
    return Growth(
        99,
        (),
        lambda path: guesses.get(path, []),
        lambda path, token: (*path, token),
        max_depth,
        chain_only,
    )


def all_paths(guesses: dict[Path, list[Guess]], max_depth: int) -> dict[Path, float]:
    """Return every path and its probability, by following all of them."""
    reached: dict[Path, float] = {(): 1.0}
    for path in sorted(guesses, key=len):
        if path in reached and len(path) < max_depth:
            for share, token, _ in guesses[path]:
                reached[(*path, token)] = reached[path] * share
    del reached[()]
    return reached


def test_guesses_are_asked_for_only_where_a_child_could_be_next() -> None:
    guesses: dict[Path, list[Guess]] = {
        (): [(0.9, 1, 0), (0.4, 2, 0), (0.05, 3, 0)],
        (1,): [(0.6, 4, 0)],  # 0.54
    }
    asked = []

    def looked_up(path: Path) -> list[Guess]:
        asked.append(path)
        return guesses.get(path, [])

    growth = Growth(99, (), looked_up, lambda path, token: (*path, token), max_depth=3)
    assert list(islice(growth, 3)) == pytest.approx([0.9, 0.54, 0.4])
    assert asked == [(), (1,), (1, 4)], "no child of (2,) could have been among the first three"


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("max_depth", [0, 1, 3])
def test_the_first_n_nodes_are_the_n_most_probable_paths(seed: int, max_depth: int) -> None:
    guesses = random_guesses(seed)
    growth = grown(guesses, max_depth)
    gains = list(growth)
    expected = sorted(all_paths(guesses, max_depth).values(), reverse=True)
    assert gains == pytest.approx(expected)
    tree = growth.tree(len(gains))
    assert tree.topology.max_depth <= max_depth
    paths = [tree.topology.path_to(node)[1:] for node in range(1, len(gains) + 1)]
    tokens = tree.token_ids.tolist()
    found = {tuple(tokens[node] for node in path) for path in paths}
    assert found == set(all_paths(guesses, max_depth))


@pytest.mark.parametrize("seed", range(10))
def test_a_chain_takes_the_best_child_of_every_node(seed: int) -> None:
    guesses = random_guesses(seed)
    growth = grown(guesses, 3, chain_only=True)
    num_drafted = len(list(growth))
    assert growth.tree(num_drafted).topology.is_chain
    assert growth.tokens == [99] + [0] * num_drafted


def test_trees_of_one_shape_are_one_topology_whichever_node_came_first() -> None:
    first: dict[Path, list[Guess]] = {(): [(0.9, 1, 0), (0.8, 2, 0)], (1,): [(0.7, 3, 0)]}
    second = first | {(): [(0.9, 1, 0), (0.5, 2, 0)]}
    trees = []
    for guesses in (first, second):
        growth = grown(guesses, 3)
        assert len(list(growth)) == 3
        trees.append((growth.tokens, growth.tree(3)))
    assert trees[0][0] == [99, 1, 2, 3] and trees[1][0] == [99, 1, 3, 2]
    assert trees[0][1].topology is trees[1][1].topology
    assert trees[0][1].token_ids.tolist() == [99, 1, 3, 2], "the likeliest path first"


def test_only_as_much_is_grown_as_is_read() -> None:
    asked: list[Path] = []
    growth = Growth(
        1,
        (),
        lambda path: asked.append(path) or [(0.5, 7, 0)],
        lambda path, token: (*path, token),
        50,
    )
    assert list(islice(growth, 3)) == [0.5, 0.25, 0.125]
    assert len(asked) == 3, "the last node's guesses are not looked up"
    assert growth.tree(2).token_ids.tolist() == [1, 7, 7]


def test_rates_go_from_the_prior_to_what_is_seen_and_follow_a_change() -> None:
    rates = AcceptanceRates([0.5, 0.5], strength=8, memory=100)
    for _ in range(50):
        rates.learn(0, True)
    assert rates.rates[0] > 0.9
    assert rates.rates[1] == 0.5
    for _ in range(400):
        rates.learn(0, False)
    assert rates.rates[0] < 0.05
    other = AcceptanceRates([0.5, 0.5])
    other.load_state(rates.state())
    assert other.rates == rates.rates
    rates.reset()
    assert list(rates.rates) == [0.5, 0.5]


def test_guesses_after_accepted_nodes_teach_their_kinds() -> None:
    growth = grown({(): [(0.6, 3, 0), (0.3, 4, 1)], (3,): [(0.5, 5, 2)]}, 3)
    assert len(list(growth)) == 3
    rates = AcceptanceRates([0.5] * 4, strength=1)
    logits = torch.zeros(2, 9)
    logits[0, 3] = logits[1, 8] = 1.0
    growth.teach(rates, verify(growth.tree(1), logits))
    assert list(rates.rates) == [0.75, 0.25, 0.25, 0.5], (
        "right, wrong, wrong and not drafted, unseen"
    )


def test_of_a_tree_in_another_order_the_right_kinds_are_taught() -> None:
    growth = grown({(): [(0.9, 1, 0), (0.5, 2, 1)], (1,): [(0.4, 3, 2)], (2,): [(0.1, 4, 3)]}, 3)
    assert len(list(growth)) == 4
    assert growth.tokens == [99, 1, 2, 3, 4]
    tree = growth.tree(4)
    assert tree.token_ids.tolist() == [99, 1, 3, 2, 4]
    logits = torch.zeros(5, 9)
    logits[0, 2] = logits[3, 4] = logits[4, 8] = 1.0
    rates = AcceptanceRates([0.5] * 4, strength=1)
    growth.teach(rates, verify(tree, logits))
    assert list(rates.rates) == [0.25, 0.75, 0.5, 0.75], "wrong, right, not reached, right"


@pytest.mark.parametrize(
    "state",
    [
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 2),
        torch.tensor([[2.0, 0.5], [1.0, 1.0]], dtype=torch.float64),
        torch.tensor([[0.5, float("nan")], [1.0, 1.0]], dtype=torch.float64),
    ],
)
def test_rates_that_are_none_are_refused(state: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rates: got"):
        AcceptanceRates([0.5, 0.5]).load_state(state)


def test_codes_are_the_nearest_buckets() -> None:
    for shares in ((0.955, 0.032, 0.013), (0.5, 0.28, 0.22), (1.0, 0.0, 0.0)):
        logits = [math.log(share) + 5 if share else -math.inf for share in shares]
        centres = [CENTRES[code - 1] for code in probability_codes(logits)]
        for centre, share in zip(centres, shares, strict=True):
            nearest = min(CENTRES, key=lambda other: abs(math.log(other / max(share, 1e-9))))
            assert centre == nearest
