"""What tests of proofs share."""

from __future__ import annotations

from typing import Any

import pytest

from model.backends.proofs import self_test as module
from model.backends.target import TargetModel


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[TargetModel]:
    """Return the targets that are self-tested from now on."""
    found: list[TargetModel] = []
    original = module.self_test

    def counted(target: TargetModel, **options: Any) -> float:
        found.append(target)
        return original(target, **options)

    monkeypatch.setattr(module, "self_test", counted)
    return found
