"""Every family whose models verify trees, on a simulated GPU: the logits of plain passes at every node."""

from __future__ import annotations

import pytest

from model.engine.self_test import self_test
from model.engine.target import TargetModel
from scripts.gpu_check.simulated.device import SimulatedCuda
from tests.model.decoded import known
from tests.model.families.families_with_trees import TREES
from tests.model.families.family import Family

EVERY = pytest.mark.parametrize("family", TREES, ids=lambda family: family.name)


@EVERY
def test_a_family_verifies_trees_on_a_gpu(family: Family, gpu: SimulatedCuda) -> None:
    known(family.name)
    with gpu:
        target = TargetModel(family.build().to("cuda"), use_kernels=False)
        self_test(target)
        assert target.chain_reason == ""
