"""A learned template holds the paths that are right most often, and recycling can draft it.

Run: pytest tests/scripts/replay/test_search_tree.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from model.budget.tree_template import TreeTemplate
from model.commands.command_line import UserError
from model.engine.budget import DraftBudget
from model.methods.recycling.drafter import RecyclingConfig
from scripts.replay.recording import RecordedTurn, Recording, Source
from scripts.replay.search_tree import TracingDrafter, learn, main, most_probable
from scripts.replay.target import ReplayTarget
from tests.model.decoded import random_ids, referee, target_of
from tests.model.families.family import VOCAB

LLAMA = "Llama, grouped heads"


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Two prompts of a tiny model with their answers, without a row yet."""
    source = Source("tiny", "0", "float32", None, VOCAB, 8, False, 16, (), "random")
    turns = []
    for seed in (1, 2):
        prompt = random_ids(12, seed=seed)
        answer = referee(target_of(LLAMA), prompt, 16)
        turns.append(RecordedTurn(seed, "any", None, tuple(prompt), tuple(answer)))
    return Recording(source, turns)


def test_a_template_is_made_of_what_was_right_most_often() -> None:
    counts = Counter({(): 1000, (0,): 600, (0, 0): 400, (1,): 200, (0, 1): 100, (2,): 50})
    paths = most_probable(counts, 5, num_ranks=3, max_depth=2)
    assert paths == [(0,), (0, 0), (1,), (0, 1), (2,)]
    assert most_probable(counts, 2, num_ranks=3, max_depth=2) == paths[:2], "templates are nested"
    assert max(map(len, most_probable(counts, 9, num_ranks=3, max_depth=2))) == 2


def test_what_was_seen_seldom_is_smoothed_and_ancestors_come_first() -> None:
    counts = Counter({(): 30, (0,): 12, (3,): 1, (0, 0): 5, (0, 0, 2): 1})
    paths = most_probable(counts, 60, num_ranks=4, max_depth=6)
    assert len(paths) == 60
    TreeTemplate(paths, "learned").check_ranks(4)
    assert paths.index((3,)) > paths.index((0, 0)), "one lucky path is no evidence"


def test_the_right_path_is_read_off_the_matrix() -> None:
    turn = RecordedTurn(1, "any", None, (9, 5), (7, 3, 4, 8, 2))
    drafter = TracingDrafter(RecyclingConfig(policy="accepted-last"), 10, [turn], max_depth=2)
    matrix = np.zeros((10, 8), dtype=np.int32)
    matrix[5, 2], matrix[7, 0], matrix[3, 1] = 7, 3, 4
    drafter.load_memory({"adjacency": torch.from_numpy(matrix)})
    drafter.start((9, 5))
    drafter.propose((9, 5), DraftBudget(20))
    assert drafter.counts == {(2,): 1, (2, 0): 1}, "no deeper than asked"
    drafter.propose((9, 5, 7, 3), DraftBudget(20))
    assert drafter.counts == {(2,): 1, (2, 0): 1, (1,): 1}, "it ends where the matrix is wrong"
    assert drafter.num_steps == 2


def test_learning_gives_nested_templates_of_the_size_asked_for(recording: Recording) -> None:
    target = ReplayTarget(recording, target_of(LLAMA))
    paths = learn(target, recording.turns, num_nodes=20, num_ranks=3, max_depth=4)
    assert len(paths) == 20
    for size in (1, 7, 20):
        TreeTemplate(paths[:size], "learned").check_ranks(3)
    assert max(map(len, paths)) <= 4
    assert learn(target, recording.turns, 20, 3, 4) == paths, "the same every time"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("--nodes 0", "nodes: got 0; allowed: 1 to 4096"),
        ("--nodes 5000", "nodes: got 5000; allowed: 1 to 4096"),
        ("--ranks 0", "ranks: got 0; allowed: 1 or more"),
        ("--rounds 0", "rounds: got 0"),
        ("", "cannot be read"),
        ("--out nowhere/tree.json", r"out: got nowhere/tree\.json; allowed"),
        ("--out {recording}", "one of the files to read; give another file"),
    ],
)
def test_mistakes_are_one_line(more: str, text: str, tmp_path: Path) -> None:
    recording, out = tmp_path / "none.replay", tmp_path / "tree.json"
    words = [str(recording), f"--out={out}", *more.format(recording=recording).split()]
    with pytest.raises(UserError, match=text):
        main(words)


def test_more_ranks_than_were_recorded_are_refused_first(
    recording: Recording, tmp_path: Path
) -> None:
    file = tmp_path / "tiny.replay"
    recording.save(file)
    with pytest.raises(UserError, match="ranks: got 9; allowed: 1 to 8, the tokens of a row"):
        main([str(file), "--extend", "--out", str(tmp_path / "tree.json"), "--ranks", "9"])
