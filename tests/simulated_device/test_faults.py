"""Faults that only a GPU shows, planted: each is found by what the other tests compare."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from model.backends.graphs import device_step
from model.backends.passes.static_cache import StaticView
from model.backends.target import TargetModel
from model.engine.tree import TreeTopology
from model.methods.recycling.adjacency import DeviceTemplate
from tests.simulated_device.demo import SETTINGS, Decoded, Setting, demo_target, run
from tests.simulated_device.device import SimulatedCuda
from tests.simulated_device.double.errors import DeviceMismatch
from tests.simulated_device.runs import Runs

HERE = "tests/simulated_device/test_faults.py"
# Its steps run whole on the device.
RECYCLING = Setting("recycling-averaged")


@pytest.fixture(scope="module")
def expected(runs: Runs) -> list[Decoded]:
    """The texts that the CPU decodes."""
    return runs.on_cpu(SETTINGS.index(RECYCLING)).texts


def with_fault(
    fault: AbstractContextManager[object], kind: str, gpu: SimulatedCuda
) -> list[Decoded]:
    """Decode on a GPU with a fault in the code."""
    with gpu, fault:
        return run(demo_target(kind, "cuda"), RECYCLING, gpu.accounts).texts


def test_depths_left_on_the_host(gpu: SimulatedCuda) -> None:
    def on_host(self: TreeTopology, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.depths)

    fault = mock.patch.object(TreeTopology, "depth_tensor", on_host)
    with pytest.raises(DeviceMismatch, match=r"cpu and cuda:0 .* at model/backends/\w+.py:\d+"):
        with_fault(fault, "eager", gpu)


def test_a_branch_on_a_tensor_within_the_step(
    gpu: SimulatedCuda, caplog: pytest.LogCaptureFixture
) -> None:
    learn = DeviceTemplate.learn

    def if_accepted(self: DeviceTemplate, *given: torch.Tensor) -> None:
        if given[-1].any():
            learn(self, *given)

    fault = mock.patch.object(DeviceTemplate, "learn", if_accepted)
    with_fault(fault, "graphed", gpu)
    assert re.search(rf"kernel by kernel: .* at {HERE}:\d+ if_accepted", caplog.text)


def test_the_length_of_the_text_as_a_number_in_the_pass(
    gpu: SimulatedCuda, expected: list[Decoded]
) -> None:
    logits_of = device_step.logits_of

    def at_number(target: TargetModel, *given: Any) -> torch.Tensor:
        start = given[3].start
        number = int(start.held)  # which the host knows
        with mock.patch.object(StaticView, "start", torch.full_like(start, number)):
            return logits_of(target, *given)

    fault = mock.patch.object(device_step, "logits_of", at_number)
    found = with_fault(fault, "graphed", gpu)
    assert [text.tokens for text in found] != [text.tokens for text in expected]


def test_a_matrix_at_a_new_address_in_each_step(
    gpu: SimulatedCuda, expected: list[Decoded]
) -> None:
    begin_step = DeviceTemplate.begin_step

    def moved(self: DeviceTemplate) -> None:
        begin_step(self)
        self._successors = self._successors.clone()

    fault = mock.patch.object(DeviceTemplate, "begin_step", moved)
    found = with_fault(fault, "graphed", gpu)
    assert [text.tokens for text in found] == [text.tokens for text in expected]
    assert found != expected, "drafts are stale, and accept lengths show it"
