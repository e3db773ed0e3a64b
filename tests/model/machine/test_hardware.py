"""Huge pages leave the same numbers at the same place; machines have names that tell them apart.

Run: pytest tests/model/machine/test_hardware.py
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from threading import Event, Lock

import pytest
import torch

from model.machine import hardware
from tests.hang import HANG


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_tensors_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    tensors = [torch.randn(size) for size in (10, 3 * hardware.PAGE // 4, 1)]
    before = [(one.data_ptr(), one.clone()) for one in tensors]
    hardware.HugePages([*tensors, torch.empty(0)]).finish()
    for tensor, (place, numbers) in zip(tensors, before, strict=True):
        assert tensor.data_ptr() == place and torch.equal(tensor, numbers)


def test_pages_wait_for_what_they_would_slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    done = Event()
    monkeypatch.setattr(hardware, "_collapse", lambda storages: storages and done.set())
    held = Lock()
    with held:
        hardware.HugePages([torch.ones(1)]).start(held)
        assert not done.wait(0.2)
    assert done.wait(HANG)


def test_pages_that_are_waited_for_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    made: list[int] = []
    monkeypatch.setattr(hardware, "_collapse", lambda storages: made.append(len(storages)))
    held = Lock()
    with held:
        pages = hardware.HugePages([torch.ones(1)])
        pages.start(held)
        pages.finish()
        pages.finish()
        assert made == [1, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has them")
def test_whether_they_are_possible_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = torch.ones(3 * hardware.PAGE, dtype=torch.uint8).untyped_storage()
    assert hardware.huge_pages_are_possible() == (hardware._collapse([asked]) > 0)
    monkeypatch.setattr(hardware, "COLLAPSE", -1)  # advice that no system knows
    assert not hardware.huge_pages_are_possible()


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (
            {"cpu family": "25", "model": "1", "flags": "fpu fma avx2 avx sse2 bmi1"},
            "family 25 model 1, avx avx2 fma",
        ),
        (
            {"cpu family": "25", "model": "17", "flags": "avx avx2 fma avx512f avx512_bf16"},
            "avx512_bf16",
        ),
        ({"Features": "fp asimd bf16 sve"}, "cores, asimd bf16 sve"),
        ({}, platform.machine()),
    ],
)
def test_processors_of_one_name_are_told_apart(
    processor: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "_processor", lambda: processor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(hardware, "GOVERNOR", tmp_path / "governor")
    assert hardware.machine_name().endswith(expected)
    (tmp_path / "governor").write_text("powersave\n")
    assert hardware.machine_name().endswith(f"{expected}, governor powersave")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ("AVX512", ["avx", "avx2", "fma", "avx512f", "avx_vnni", "amx_int8"]),
        ("AVX2", ["avx", "avx2", "fma", "avx_vnni"]),
        ("DEFAULT", []),
    ],
)
def test_what_torch_may_not_use_is_not_named(
    capability: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"flags": "fpu fma avx2 avx avx_vnni avx512f amx_int8"}
    monkeypatch.setattr(hardware, "_processor", lambda: flags)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert hardware.instruction_sets() == expected
