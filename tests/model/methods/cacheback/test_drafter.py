"""Cacheback drafts what a hand-made trace says, and keeps the n-grams used last.

Run: pytest tests/model/methods/cacheback/test_drafter.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model.engine.budget import DraftBudget
from model.methods.cacheback.drafter import CachebackConfig, CachebackDrafter

VOCAB = 50
ROOMY = DraftBudget(50)


def drafter(**options: Any) -> CachebackDrafter:
    """Return a drafter of leaders of one token and followers of two."""
    config = CachebackConfig(**{"follower_length": 2} | options)
    return CachebackDrafter(config, VOCAB, torch.device("cpu"))


def nodes(
    cacheback: CachebackDrafter, context: list[int], budget: DraftBudget = ROOMY
) -> list[tuple[int, int]]:
    """Return the token and the parent of every node of the draft after a text."""
    tree = cacheback.propose(context, budget)
    tree.topology.check(budget.max_depth, budget.chain_only, cacheback.max_nodes)
    return list(zip(tree.token_ids.tolist(), tree.topology.parents, strict=True))


def test_followers_of_followers_are_drafted_level_by_level_the_newest_first() -> None:
    text = [1, 2, 3, 1, 4, 5, 1]
    cacheback = drafter(num_nodes=9)
    cacheback.start(text)
    # 1 -> 2 3 and, later, 4 5; 5 has no follower of two tokens yet, and 3 has 1 4, 1 after that is new there.
    first = [(1, -1), (4, 0), (5, 1), (2, 0), (3, 3), (1, 4), (4, 5)]
    # 4 was followed by 5 1; from there on as after the root.
    assert nodes(cacheback, text) == [*first, (5, 6), (1, 7), (4, 8)]
    cacheback.skip([2])  # completes 5 1 2 alone
    assert nodes(cacheback, [*text, 2])[:4] == [(2, -1), (3, 0), (1, 1), (4, 2)]
    cacheback.skip([3])  # 1 2 3 is the newest of 1 again
    assert nodes(cacheback, [*text, 2, 3, 1])[1:3] == [(2, 0), (3, 1)]


def test_paths_share_their_beginning_and_keep_to_the_limits() -> None:
    cacheback = drafter()
    cacheback.start([1, 2, 3, 1, 2, 4, 9, 1])
    assert nodes(cacheback, [1])[:4] == [(1, -1), (2, 0), (4, 1), (3, 1)]
    assert len(nodes(cacheback, [1])) == 64, "a text that comes back fills every draft"
    assert nodes(cacheback, [1], DraftBudget(1)) == [(1, -1), (2, 0)]
    chain = nodes(cacheback, [1], DraftBudget(5, chain_only=True))
    assert (
        chain == [(1, -1), (2, 0), (4, 1), (9, 2), (1, 3), (2, 4)][: len(chain)] and len(chain) > 2
    )
    assert nodes(cacheback, [7]) == [(7, -1)]


def test_what_was_written_longest_ago_makes_room() -> None:
    cacheback = drafter(leaders=2, followers=2, num_nodes=2)
    cacheback.start([1, 2, 3, 1, 4, 5])
    # Leaders in order: 1, 2, 3, 1. 2 has gone; 1 came back before it could.
    assert nodes(cacheback, [2]) == [(2, -1)]
    assert nodes(cacheback, [3]) == [(3, -1), (1, 0), (4, 1)]
    few = drafter(followers=2, num_nodes=6)
    few.start([1, 2, 3, 1, 4, 5, 1, 6, 7])
    assert [token for token, parent in nodes(few, [1]) if parent == 0] == [6, 4]


def test_a_leader_of_two_tokens_needs_both() -> None:
    cacheback = drafter(leader_length=2, num_nodes=2)
    cacheback.start([1, 2, 3, 4])
    assert nodes(cacheback, [1, 2]) == [(2, -1), (3, 0), (4, 1)]
    assert nodes(cacheback, [5, 2]) == nodes(cacheback, [2]) == [(2, -1)]


def test_a_text_does_not_go_on_where_another_ended_and_a_saved_table_drafts_the_same() -> None:
    cacheback = drafter(num_nodes=20)
    cacheback.start([1, 2])
    cacheback.start([3, 1, 2, 5, 1, 4, 3])
    assert nodes(cacheback, [2])[:3] == [(2, -1), (5, 0), (1, 1)]
    loaded = drafter(num_nodes=20)
    loaded.load_memory(cacheback.memory())
    for token in range(6):
        assert nodes(loaded, [token]) == nodes(cacheback, [token])
    loaded.reset()
    assert nodes(loaded, [2]) == [(2, -1)]


def test_a_frozen_table_answers_after_the_other_and_never_changes(tmp_path: Path) -> None:
    learned = drafter()
    learned.start([1, 2, 3, 8])
    file = tmp_path / "frozen.safetensors"
    save_file(learned.memory(), file)
    cacheback = drafter(frozen=str(file), num_nodes=4)
    assert nodes(cacheback, [1]) == [(1, -1), (2, 0), (3, 1)]
    cacheback.start([1, 6, 7, 9])
    assert nodes(cacheback, [1]) == [(1, -1), (6, 0), (7, 1), (2, 0), (3, 3)]
    assert len(cacheback.memory()["ngrams"]) == 2
    cacheback.reset()
    assert nodes(cacheback, [2]) == [(2, -1), (3, 0), (8, 1)]


@pytest.mark.parametrize(
    ("ngrams", "wrong"),
    [
        (torch.zeros(2, 4, dtype=torch.int32), "shape"),
        (torch.full((2, 3), VOCAB, dtype=torch.int32), "vocabulary"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    ngrams: torch.Tensor, wrong: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=wrong):
        drafter().load_memory({"ngrams": ngrams})
    file = tmp_path / "wrong.safetensors"
    save_file({"ngrams": ngrams}, file)
    with pytest.raises(ValueError, match=f"frozen .*{wrong}"):
        drafter(frozen=str(file))
    with pytest.raises(ValueError, match=r"frozen .*cannot be read"):
        drafter(frozen=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="ngrams"):
        drafter().load_memory({"rows": ngrams})
