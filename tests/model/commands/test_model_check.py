"""The check of a model passes rows that do not depend on those beside, and finds rows and states that do.

Run: pytest tests/model/commands/test_model_check.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from model import doctor
from model.backends.passes.cache import TreeCache
from model.backends.target import TargetModel
from model.commands import model_check
from model.commands.command_line import UserError
from model.commands.model_check import compared
from model.engine.tree import DraftTree
from tests.model.api.test_decoder import demo

BESIDE = ("drafted rows", "rows of other texts")


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(demo()[0])


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare few rows."""
    monkeypatch.setattr(model_check, "COUNTS", (1, 9))
    monkeypatch.setattr(model_check, "POSITIONS", 3)


def wrong(found: Sequence[model_check.Checked]) -> list[str]:
    """What is not as it should be."""
    return [one.found.partition(":")[0] for one in found if not one.is_right]


def test_rows_of_this_library_have_the_bits_that_they_have_alone(target: TargetModel) -> None:
    found = list(compared(target))
    assert [one.found for one in found] == [
        *(
            f"beside {count} {rows}: 3 of 3 have the same bits"
            for rows in BESIDE
            for count in (1, 9)
        ),
        "after a kept draft: 3 of 3 have the same bits",
    ]
    assert not wrong(found)


def test_a_row_that_knows_its_neighbours_is_found(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TargetModel.forward

    def forward(self: TargetModel, tree: DraftTree, cache: TreeCache) -> torch.Tensor:
        return right(self, tree, cache) + 2**-10 * (tree.topology.num_nodes > 5)

    monkeypatch.setattr(TargetModel, "forward", forward)
    found = list(compared(target))
    assert wrong(found) == ["beside 9 drafted rows"]
    assert any(
        "0 of 3 have the same bits; logits differ by up to 0.000977" in one.found for one in found
    )


def test_a_wrong_row_that_is_kept_is_found(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TreeCache.keep

    def keep(self: TreeCache, base: int, rows: Sequence[int]) -> None:
        right(self, base, range(len(rows)))

    monkeypatch.setattr(TreeCache, "keep", keep)
    assert wrong(list(compared(target))) == ["after a kept draft"]


def test_the_command_ends_with_1_if_something_is_wrong(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--check", "data/demo/model", "--dtype", "bfloat16"]
    assert doctor.run([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["findings"]
    assert [one["name"] for one in told] == ["model", "self-test", *["rows"] * 4, "states"]
    assert not any(one["advice"] for one in told)
    monkeypatch.setattr(model_check, "compared", lambda _: [model_check.Checked("rows", "", False)])
    assert doctor.run(words) == 1
    assert "decided otherwise" in capsys.readouterr().out
    with pytest.raises(UserError, match="dtype: got it without --check; give --check MODEL"):
        doctor.run(words[2:])
