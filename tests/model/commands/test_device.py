"""The device `auto`: a GPU, the CPU where there is none, and an error where torch cannot use one.

Run: pytest tests/model/commands/test_device.py
"""

from __future__ import annotations

import subprocess
import warnings
from pathlib import Path

import pytest
import torch

from model.commands import loading, model_options
from model.commands.command_line import UserError
from model.commands.model_options import ModelOptions, auto_device, nvidia_driver

DRIVER_TEXT = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27 21:21:55 UTC 2021
GCC version:  gcc version 9.4.0 (Ubuntu 9.4.0-1ubuntu1~20.04.2)
"""
TOO_OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). "
    "Please update your GPU driver (Triggered internally at CUDAFunctions.cpp:108.)"
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without GPU, with a torch built with CUDA; files put here are its driver's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(model_options.shutil, "which", lambda _: None)
    monkeypatch.setattr(model_options, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(model_options, "DEVICE_FILES", tmp_path)
    return tmp_path


def add_gpu(machine: Path, text: str = DRIVER_TEXT) -> None:
    """Give the machine a GPU and its driver."""
    (machine / "version").write_text(text)
    (machine / "nvidia0").touch()


def give_smi(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    """Give the machine an nvidia-smi that says this."""
    monkeypatch.setattr(model_options.shutil, "which", lambda name: f"/usr/bin/{name}")
    done = subprocess.CompletedProcess(model_options.NVIDIA_SMI, code, said, "")
    monkeypatch.setattr(model_options.subprocess, "run", lambda *_, **__: done)


def test_a_gpu_that_torch_can_use_is_used(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpu(machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert auto_device() == "cuda"


@pytest.mark.usefixtures("machine")
def test_without_a_gpu_a_torch_built_with_cuda_runs_on_the_cpu() -> None:
    assert auto_device() == "cpu"
    assert loading.choose_device(ModelOptions()).type == "cpu"


def test_a_container_that_sees_the_driver_of_its_host_alone_runs_on_the_cpu(machine: Path) -> None:
    (machine / "version").write_text(DRIVER_TEXT)
    assert auto_device() == "cpu"


@pytest.mark.usefixtures("machine")
def test_a_driver_that_finds_no_gpu_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    give_smi(monkeypatch, 9, "NVIDIA-SMI has failed because it couldn't communicate\n")
    assert auto_device() == "cpu"


def test_a_driver_that_is_too_old_is_refused_in_one_line(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gpu(machine)

    def is_available() -> bool:
        warnings.warn(TOO_OLD, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    with pytest.raises(UserError) as refused, warnings.catch_warnings():
        warnings.simplefilter("error")
        loading.choose_device(ModelOptions())
    text = str(refused.value)
    assert text.startswith("device: got auto, but torch ") and "\n" not in text
    assert (
        "(driver 470.82.01): CUDA initialization: The NVIDIA driver on your system is too" in text
    )
    assert "too old (found version 11040); install a torch built for that driver" in text
    assert "--device cpu" in text


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_the_cpu_that_was_asked_for_is_used_beside_a_gpu(
    name: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gpu(machine)
    if name == "auto":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert loading.choose_device(ModelOptions(device=name)).type == "cpu"


def test_a_torch_built_without_cuda_is_refused_beside_a_gpu(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gpu(machine)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"\(driver 470.82.01\): it is built without CUDA; install"):
        auto_device()


def test_the_version_of_the_driver_is_found_where_it_can_be(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gpu(machine)
    assert nvidia_driver() == "470.82.01"
    add_gpu(machine, "a driver of another kind")
    assert nvidia_driver() == "of unknown version"
    give_smi(monkeypatch, 0, "535.104.05\n535.104.05\n")
    assert nvidia_driver() == "535.104.05"
    give_smi(monkeypatch, 18, "Failed to initialize NVML: Driver/library version mismatch\n")
    assert nvidia_driver() == "of unknown version"
