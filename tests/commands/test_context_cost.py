"""The cost of context: what is timed as attention is attention, and the command on a short text."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional

from model.engine.target import TargetModel
from model.engine.tree import DraftTree
from model.kernels import short_pass as few_rows
from model.kernels.attention import AttentionKernels
from tests.commands import context_cost
from tests.commands.context_cost import ContextCost, context_costs, main
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


def test_the_command_prints_every_point(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--contexts 8 40 --nodes 1 3 --threads 1"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    costs = [ContextCost(**cost) for cost in found]
    assert [(cost.num_nodes, cost.context) for cost in costs] == [(1, 8), (1, 40), (3, 8), (3, 40)]
    assert all(0 < cost.attention < cost.milliseconds for cost in costs)


def test_models_that_verify_chains_alone_are_timed_with_chains() -> None:
    target = TargetModel(known("BLOOM").build())
    costs = context_costs(target, [1, 5], [16], num_rounds=1)
    assert [cost.num_nodes for cost in costs] == [1, 5]


def test_a_chain_that_leaves_the_models_context_is_left_out() -> None:
    target = TargetModel(known("GPT-Neo").build())
    costs = context_costs(target, [1, 2, 3], [16, 510], num_rounds=1)
    found = [(cost.num_nodes, cost.context) for cost in costs]
    assert found == [(1, 16), (1, 510), (2, 16), (2, 510), (3, 16)]
