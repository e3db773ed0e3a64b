"""A model whose layers are on two GPUs: every method decodes as on one."""

from __future__ import annotations

import copy

import pytest
import torch

from model.backends.proofs.packing import batch_of
from model.backends.proofs.self_test import self_test
from model.backends.target import TargetModel
from model.engine.sequence import Request
from tests.simulated_device.demo import (
    COSTS,
    END,
    FIRST_TEXT,
    NEARLY_FLAT,
    NUM_TOKENS,
    SETTINGS,
    Costs,
    GivenCosts,
    Setting,
    demo_model,
    prompt_of,
    text_of,
)
from tests.simulated_device.device import SimulatedCuda
from tests.simulated_device.runs import Runs

accelerate = pytest.importorskip("accelerate", reason="spreads a model over devices")


@pytest.fixture(scope="module")
def spread(gpu: SimulatedCuda) -> TargetModel:
    """The demo model, its second half on the second GPU."""
    with gpu, torch.inference_mode(mode=False):
        model = copy.deepcopy(demo_model())
        half = len(model.model.layers) // 2
        first, second = "cuda:0", "cuda:1"
        layers = {f"model.layers.{i}": (first, second)[i // half] for i in range(2 * half)}
        # The output head has the weights of the embedding.
        begin = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "lm_head"), first)
        model = accelerate.dispatch_model(model, {**layers, **begin, "model.norm": second})
        target = TargetModel(model, use_kernels=False)
        self_test(target)
        target.measured[COSTS] = GivenCosts(*NEARLY_FLAT)
    return target


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_method_decodes_on_two_gpus_as_on_the_cpu(
    setting: Setting, spread: TargetModel, gpu: SimulatedCuda, runs: Runs
) -> None:
    expected = runs.on_cpu(SETTINGS.index(setting)).texts[0]
    with gpu:
        drafter = setting.drafter(spread)
        found = text_of(spread, drafter, FIRST_TEXT, gpu.accounts, Costs())
    assert found == expected


def test_texts_share_passes_on_two_gpus(
    spread: TargetModel, gpu: SimulatedCuda, runs: Runs
) -> None:
    setting = Setting("recycling-averaged")
    expected = runs.on_cpu(SETTINGS.index(setting)).texts[0].tokens
    found: list[list[int]] = [[], []]
    with gpu:
        batch = batch_of(spread, setting.drafter(spread), 2)
        for key in range(2):
            batch.add(key, Request(prompt_of(FIRST_TEXT), NUM_TOKENS, {END}))
        while len(batch):
            events = batch.step()
            assert [event.record and event.record.num_sequences for event in events] == [2, 2]
            for event in events:
                found[event.key] += event.record.tokens if event.record else []
    assert found == [expected] * 2


def test_both_gpus_hold_layers_and_their_rows(spread: TargetModel, gpu: SimulatedCuda) -> None:
    both = {torch.device("cuda:0"), torch.device("cuda:1")}
    assert {parameter.device for parameter in spread.model.parameters()} == both
    assert {shape.keys.device for shape in spread.layer_shapes if shape and shape.keys} == both
