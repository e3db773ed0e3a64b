"""Every method on a GPU, simulated or real: the CPU's tokens in the CPU's steps, which cost what a table says.

The steps are compared, too: a fault that makes drafts stale leaves the tokens as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from tests.model.families.family import IS_VERSION_4
from tests.simulated_device.demo import SETTINGS, Setting
from tests.simulated_device.runs import CASES, Runs, name_of, table

EVERY = pytest.mark.parametrize("case", CASES, ids=name_of)
Case = tuple[str, Setting]


@EVERY
def test_a_method_decodes_on_a_gpu_as_on_the_cpu(case: Case, device_runs: Runs) -> None:
    kind, setting = case
    index = SETTINGS.index(setting)
    assert device_runs.on_gpu(kind, index).texts == device_runs.on_cpu(index).texts


@EVERY
def test_a_step_waits_where_the_table_says_and_launches_no_more(
    case: Case, device_runs: Runs
) -> None:
    kind, setting = case
    costs = device_runs.on_gpu(kind, SETTINGS.index(setting)).costs
    stated = table()[kind][setting.name]
    if device_runs.gpu is None:  # torch tells of some waits alone, of no kinds, and of no launches
        assert by_place(costs.waits) <= by_place(stated["waits"])
        return
    assert costs.waits == stated["waits"], "is it meant? python -m tests.simulated_device.runs"
    if IS_VERSION_4:
        return  # whose layers launch other kernels
    assert 0 < costs.launches <= stated["launches"]
    assert costs.launches <= costs.kernels <= stated["kernels"]


def by_place(waits: Mapping[str, int]) -> Counter[str]:
    """Return the counts of waits by place, whatever their kind."""
    found = Counter[str]()
    for name, count in waits.items():
        found[name.partition(" at ")[2]] += count
    return found


def test_the_table_states_no_more_than_is_run() -> None:
    named = {(kind, name) for kind, settings in table().items() for name in settings}
    assert named == {(kind, setting.name) for kind, setting in CASES}
