"""Huge pages leave the same numbers at the same place; machines have names that tell them apart.

Run: pytest tests/model/machine/test_hardware.py
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
import torch

from model.machine import hardware


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has them")
def test_tensors_stay_as_they_are() -> None:
    tensors = [torch.randn(size) for size in (10, 3 * hardware.PAGE // 4, 1)]
    before = [(one.data_ptr(), one.clone()) for one in tensors]
    thread = hardware.use_huge_pages([*tensors, torch.empty(0)])
    assert thread is not None
    thread.join()
    for tensor, (place, numbers) in zip(tensors, before, strict=True):
        assert tensor.data_ptr() == place and torch.equal(tensor, numbers)


def test_without_tensors_no_thread_is_started() -> None:
    assert hardware.use_huge_pages([]) is None


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert hardware.use_huge_pages([torch.ones(1)]) is None


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
    monkeypatch.setattr(hardware, "GOVERNOR", tmp_path / "governor")
    assert hardware.machine_name().endswith(expected)
    (tmp_path / "governor").write_text("powersave\n")
    assert hardware.machine_name().endswith(f"{expected}, governor powersave")
