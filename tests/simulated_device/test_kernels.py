"""What passes on a GPU launch: norms of one kernel each, attention by measurement, at the first use alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import model.kernels.attention as attention_module
import model.kernels.choice as choice_module
from model.engine.self_test import self_test
from model.engine.target import TargetModel
from model.kernels.choice import KEYS, ROWS
from model.kernels.measured_attention import FOLDED, choice_on_gpu
from model.kernels.norms import has_fused_rms_norm
from model.kernels.registered import USUAL
from scripts.gpu_check.simulated.device import SimulatedCuda
from tests.model.decoded import known
from tests.simulated_device.demo import Setting, demo_model, run

RECYCLING = Setting("recycling")
# Launches of a norm beyond one: squares, their mean, epsilon, root, two products; in half precision two casts.
SAVED = {torch.float32: 5, torch.float16: 7}
# Launches of a 7B model's eager step, 32 layers, and what is allowed.
LAYERS_7B, MOST_LAUNCHES = 32, 900


@contextmanager
def always(name: str) -> Iterator[None]:
    """Let every measurement find this function the fastest."""
    with pytest.MonkeyPatch.context() as patch:
        choice = ((name,) * len(KEYS),) * len(ROWS)
        patch.setattr(attention_module, "choice_on_gpu", lambda *given: choice)
        yield


@torch.inference_mode(mode=False)
def moved(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy of a model on the first GPU."""
    return copy.deepcopy(model).to(dtype).to("cuda")


@pytest.mark.parametrize("dtype", SAVED)
def test_norms_are_one_launch_each(gpu: SimulatedCuda, dtype: torch.dtype) -> None:
    assert not has_fused_rms_norm()
    costs, texts = [], []
    with gpu, always(USUAL):
        model = moved(demo_model(), dtype)
        for use_kernels in (False, True):
            target = TargetModel(model, use_kernels)
            self_test(target)
            if dtype == torch.float32:  # in which near-ties are decided
                texts.append(run(target, RECYCLING, gpu.accounts).texts)
            costs.append(run(target, RECYCLING, gpu.accounts).costs)
        num_norms = len(target.norms)
    assert texts[:1] == texts[1:]
    assert num_norms == 2 * model.config.num_hidden_layers + 1
    assert costs[0].launches - costs[1].launches == SAVED[dtype] * num_norms
    assert costs[0].waits == costs[1].waits


def test_an_eager_step_of_7b_has_few_launches(gpu: SimulatedCuda) -> None:
    costs = []
    with gpu, always(USUAL):
        model = moved(demo_model(), torch.float16)
        for num_layers in (len(model.model.layers), 1):
            model.model.layers = model.model.layers[:num_layers]
            model.config.num_hidden_layers = num_layers
            costs.append(run(TargetModel(model), RECYCLING, gpu.accounts).costs.launches)
    num_layers = demo_model().config.num_hidden_layers
    of_a_layer = (costs[0] - costs[1]) / (num_layers - 1)
    assert costs[1] + (LAYERS_7B - 1) * of_a_layer <= MOST_LAUNCHES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FOLDED)
def test_folded_heads_are_lossless(
    function: str, dtype: torch.dtype, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, calls = FOLDED[function], []
    monkeypatch.setitem(
        FOLDED, function, lambda query, *rest: calls.append(query.device) or attend(query, *rest)
    )
    with gpu, always(function):
        target = TargetModel(moved(known("Llama, grouped heads").build(), dtype))
        self_test(target)
    assert not target.chain_only, "a tree is not lossless"
    assert {*calls} == {torch.device("cuda:0")}


def test_attention_is_measured_at_the_first_pass_and_never_again(
    gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed: list[Any] = []
    monkeypatch.setattr(
        choice_module, "seconds_of", lambda call, wait: timed.append(call) or float(len(timed) < 9)
    )
    choice_on_gpu.cache_clear()
    with gpu:
        model = moved(known("Llama, grouped heads").build(), torch.float16)
        target = TargetModel(model)
        assert not timed
        self_test(target)
        num_timed = len(timed)
        assert num_timed == (choice_module.ROUNDS + 1) * 3 * len(ROWS) * len(KEYS)
        assert not capsys.readouterr().err, "a candidate does not work"
        gpu.accounts.clear()
        read(target)
        read(TargetModel(model))
        assert len(timed) == num_timed, "measured within an answer"
        assert not [kind for kind, _ in gpu.accounts.waits if kind == "synchronize"]
    choice_on_gpu.cache_clear()


def read(target: TargetModel) -> None:
    """Run a prompt and a step."""
    token_ids = torch.zeros(5, dtype=torch.long, device=target.device)
    with torch.inference_mode():
        cache = target.new_cache(20)
        target.read(token_ids, 0, cache, last_logits_only=True)
        target.read(token_ids[:1], cache.length, cache, last_logits_only=True)
