"""The check of rows finds an arithmetic that depends on the rows beside, and passes one that does not.

Run: pytest tests/evaluation/checking/test_row_bits.py
"""

from __future__ import annotations

import json

import pytest
import torch

from evaluation.check_rows import main
from evaluation.checking.row_bits import OTHER_TEXTS, OURS, STOCK, row_bits
from model.commands.command_line import UserError
from model.engine.cache import TreeCache
from model.engine.target import TargetModel
from model.engine.tree import DraftTree
from tests.model.api.test_decoder import demo
from tests.model.decoded import random_ids


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(demo()[0])


def test_rows_of_this_library_have_the_bits_that_they_have_alone(target: TargetModel) -> None:
    found = row_bits(target, random_ids(12, 1), (1, 9), 3)
    assert [(one.arithmetic, one.num_beside) for one in found] == [
        (name, count) for name in (STOCK, OURS, OTHER_TEXTS) for count in (1, 9)
    ]
    assert all(one.num_rows == 3 for one in found)
    assert all(one.is_stable for one in found if one.arithmetic != STOCK)
    # The same logits but for rounding, so that the same rows were compared.
    assert all(one.largest_difference < 1e-4 for one in found)


def test_a_row_that_knows_its_neighbours_is_found(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TargetModel.forward

    def wrong(self: TargetModel, tree: DraftTree, cache: TreeCache) -> torch.Tensor:
        return right(self, tree, cache) + 2**-10 * (tree.topology.num_nodes > 4)

    monkeypatch.setattr(TargetModel, "forward", wrong)
    found = {
        (one.arithmetic, one.num_beside): one
        for one in row_bits(target, random_ids(12, 1), (1, 9), 3)
    }
    assert found[OURS, 1].is_stable
    assert (found[OURS, 9].num_equal, found[OTHER_TEXTS, 9].num_equal) == (0, 3)
    assert found[OURS, 9].largest_difference == pytest.approx(2**-10, rel=1e-2)


def test_the_command_prints_a_line_for_each_count(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dtype", "bfloat16", "--positions", "2"]
    assert main([*words, "--beside", "1", "3"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["is_stable"]
    assert [row["num_beside"] for row in report["rows"]] == [1, 3] * 3
    with pytest.raises(UserError, match="beside: got 0; allowed: 1 or more"):
        main([*words, "--beside", "0"])
