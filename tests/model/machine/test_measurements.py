"""Measurements are kept on disk if there is a folder for them; a missing folder is no error.

Run: pytest tests/model/machine/test_measurements.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from model.machine.files import read_measured, write_measured


def no_home() -> Path:
    """Do what `Path.home` does for a user without one."""
    raise RuntimeError("Could not determine home directory.")


def test_without_a_home_it_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TOKEN_RECYCLING_CACHE", raising=False)
    write_measured("costs", "key", [1])
    assert read_measured("costs", "key") is None
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    write_measured("costs", "key", [1])
    assert read_measured("costs", "key") == [1]
    monkeypatch.delenv("TOKEN_RECYCLING_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_measured("costs", "key", [2])
    assert read_measured("costs", "key") == [2]
    assert [file.name for file in (tmp_path / "cache" / "token-recycling").iterdir()] == [
        "costs-key.json"
    ]
