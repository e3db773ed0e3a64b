"""cuDNN's attention is off where models run on a GPU; the switches are plain flags, on the CPU too.

Run: pytest tests/model/kernels/test_sdpa.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from model.backends.target import TargetModel
from model.commands import loading
from model.commands.model_options import ModelOptions
from model.kernels.registered_attention import sdpa_backends, turn_off_cudnn, without_cudnn
from tests.model.decoded import target_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def is_on() -> bool:
    """Whether PyTorch may choose cuDNN's attention."""
    return torch.backends.cuda.cudnn_sdp_enabled()


@pytest.fixture(autouse=True)
def cudnn() -> Iterator[None]:
    """PyTorch's default before and after every test."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> TargetModel:
    """A target that says it is on a GPU."""
    target = target_of("Llama, grouped heads")
    monkeypatch.setattr(target, "device", GPU)
    return target


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_command_turns_it_off_for_models_on_a_gpu(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "choose_device", lambda _: device)
    loading.check_model(ModelOptions())
    assert is_on() == (device.type == "cpu")


def test_the_library_turns_it_off_for_its_passes_alone(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run(*_: Any, **__: Any) -> torch.Tensor:
        seen.append(is_on())
        raise RuntimeError("a pass that fails")

    monkeypatch.setattr(target, "run", run)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a pass that fails"):
            target.read(torch.tensor([1]), 0, target.new_cache(4), last_logits_only=True)
        assert is_on(), "the user's switch was left off"
    assert seen == [False, False]


def test_a_user_who_turned_it_off_keeps_it_off(target: TargetModel) -> None:
    turn_off_cudnn(GPU)
    with target.kernels(1):
        assert not is_on()
    assert not is_on()


def test_blocks_of_two_threads_that_overlap_leave_the_switch_as_it_was() -> None:
    one, other = without_cudnn(GPU), without_cudnn(GPU)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert is_on()


def test_passes_on_the_cpu_leave_the_switch_alone() -> None:
    with target_of("Llama, grouped heads").kernels(1):
        assert is_on()


def test_the_backends_are_named_in_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sdpa_backends(CPU) is None
    assert sdpa_backends(GPU) == "cudnn+flash+efficient+math"
    turn_off_cudnn(GPU)
    assert sdpa_backends(GPU) == "flash+efficient+math"
    monkeypatch.setattr(torch.backends.cuda, "math_sdp_enabled", lambda: False)
    assert sdpa_backends(GPU) == "flash+efficient"
