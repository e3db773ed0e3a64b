"""The cost of context: what is timed as attention is attention, and the command on a short text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from evaluation.command_line import UserError
from scripts import context_cost
from scripts.context_cost import ContextCost, main
from tests.model.decoded import target_of


def test_every_attention_call_is_timed_and_the_kernel_is_put_back() -> None:
    target = target_of("Llama, grouped heads")
    kernel = functional.scaled_dot_product_attention
    with torch.inference_mode(), context_cost._timed_attention(target) as seconds:
        for _ in target.prefill([1, 2, 3], target.new_cache(4), with_logits=False):
            pass
    assert len(seconds) == target.config.num_hidden_layers
    assert functional.scaled_dot_product_attention is kernel


def test_the_command_prints_every_point_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "cost.png"
    sizes = ["--contexts", "8", "40", "--nodes", "1", "3", "--threads", "1"]
    assert main([*sizes, "--out", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    costs = [ContextCost(**cost) for cost in report["costs"]]
    assert [(cost.num_nodes, cost.context) for cost in costs] == [(1, 8), (1, 40), (3, 8), (3, 40)]
    assert all(0 < cost.attention < cost.milliseconds for cost in costs)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--contexts", "0"], "contexts: got 0"),
        (["--nodes", "-1"], "nodes: got -1"),
        (["--out", "nowhere/cost.png"], "out: got nowhere/cost.png"),
        (["--threads", "0"], "threads: got 0"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text) as error:
        main(options)
    assert "\n" not in str(error.value)
