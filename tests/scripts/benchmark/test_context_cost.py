"""The cost of context: what is timed as attention is attention, and the command on a short text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from model.commands.command_line import UserError
from model.engine.target import TargetModel
from model.engine.tree import DraftTree
from model.kernels import short_pass as few_rows
from model.kernels.attention import AttentionKernels
from scripts.benchmark import context_cost
from scripts.benchmark.context_cost import ContextCost, context_costs, main
from tests.evaluation.conftest import DEMO_MODEL, TOKENIZER_FILES
from tests.model.decoded import known


@pytest.mark.parametrize("has_kernel", [False, True])
def test_every_attention_call_is_timed_and_the_kernels_are_put_back(has_kernel: bool) -> None:
    if has_kernel and not few_rows.short_pass_kernel():
        pytest.skip("the kernels cannot be built here")
    target = TargetModel(known("Llama, grouped heads").build())
    target.__dict__["attention"] = AttentionKernels(target.config, True, has_kernel)
    kernels = functional.scaled_dot_product_attention, few_rows.attend
    cache = target.new_cache(8)
    with torch.inference_mode(), context_cost._timed_attention(target) as seconds:
        list(target.prefill([1, 2, 3], cache, with_logits=False))
        assert len(seconds) == target.config.num_hidden_layers
        target.forward(DraftTree.chain([3, 4]), cache)
        assert len(seconds) == 2 * target.config.num_hidden_layers
    assert (functional.scaled_dot_product_attention, few_rows.attend) == kernels


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


def test_models_that_verify_chains_alone_are_timed_with_chains() -> None:
    target = TargetModel(known("BLOOM").build())
    costs = context_costs(target, [1, 5], [16], num_rounds=1)
    assert [cost.num_nodes for cost in costs] == [1, 5]


def test_a_chain_that_leaves_the_models_context_is_one_line(tmp_path: Path) -> None:
    config = GPTNeoConfig(
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
        window_size=8,
    )
    GPTNeoForCausalLM(config).save_pretrained(tmp_path)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, tmp_path)
    words = ["--model-path", str(tmp_path), "--nodes", "1", "4", "--contexts", "20"]
    assert main([*words, "60"]) == 0
    with pytest.raises(
        UserError, match="contexts: got 61 with 4 nodes, which are a chain with this model"
    ):
        main([*words, "61"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--contexts", "0"], "contexts: got 0"),
        (["--contexts", "2000000000"], "contexts: got 2000000000; allowed: 1 to 3070"),
        (["--nodes", "-1"], "nodes: got -1"),
        (["--out", "nowhere/cost.png"], "out: got nowhere/cost.png"),
        (["--threads", "0"], "threads: got 0"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text) as error:
        main(options)
    assert "\n" not in str(error.value)
