"""Every method on a simulated GPU: the CPU's tokens in the CPU's steps.

The steps are compared, too: a fault that makes drafts stale leaves the tokens as they are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from model.engine.target import TargetModel
from scripts.gpu_check.simulated.device import SimulatedCuda
from tests.simulated_device.conftest import Targets
from tests.simulated_device.demo import KINDS, SETTINGS, Decoded, Setting, decoded

CASES = [
    pytest.param(kind, setting, id=f"{kind}-{setting.name}")
    for kind in KINDS
    for setting in SETTINGS
    if setting.runs_on(kind)
]


@pytest.fixture(scope="module")
def expected(on_cpu: TargetModel) -> Any:
    """What each setting decodes on the CPU."""

    @lru_cache
    def of(index: int) -> Decoded:
        return decoded(on_cpu, SETTINGS[index])

    return of


@pytest.mark.parametrize(("kind", "setting"), CASES)
def test_a_method_decodes_on_a_gpu_as_on_the_cpu(
    kind: str, setting: Setting, gpu: SimulatedCuda, on_gpu: Targets, expected: Any
) -> None:
    target = on_gpu(kind)
    with gpu:
        found = decoded(target, setting)
    assert found == expected(SETTINGS.index(setting))
