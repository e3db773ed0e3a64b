"""The parts of a pass: every operation counts once, and the command prints them.

Run: pytest tests/scripts/benchmark/test_pass_parts.py
"""

from __future__ import annotations

import json

import pytest

from model.commands.command_line import UserError
from scripts.benchmark.pass_parts import PassParts, _kind, main


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_the_command_prints_every_part(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--nodes", "3", "1", "--context", "8", "--threads", "1", "--kernels", kernels]
    assert main(sizes) == 0
    table, _, report = capsys.readouterr().out.strip().rpartition("\n")
    parts = [PassParts(**one) for one in json.loads(report)["parts"]]
    assert [one.num_nodes for one in parts] == [1, 3] and table.count("\n") == 3
    for one in parts:
        assert min(one.products, one.attention, one.others, one.read) > 0


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("token_recycling::few_rows_of_layers", "products"),
        ("aten::addmm", "products"),
        ("token_recycling::attend", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("token_recycling::norm", "others"),
        ("aten::copy_", "others"),
    ],
)
def test_operations_are_known_by_name(operation: str, kind: str) -> None:
    assert _kind(operation) == kind


def test_no_rows_are_refused() -> None:
    with pytest.raises(UserError, match="nodes: got 0; allowed: 1 or more"):
        main(["--nodes", "0"])


def test_a_context_that_the_model_lacks_is_refused_before_the_weights_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("scripts.benchmark.pass_parts.load_target")
    with pytest.raises(UserError, match="contexts: got 1000000; allowed: 1 to"):
        main(["--context", "1000000"])
