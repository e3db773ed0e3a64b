"""Every family whose models verify trees, on a simulated GPU: right logits at every node, and the CPU's steps."""

from __future__ import annotations

import pytest

from model.engine.loop import generate
from model.engine.self_test import self_test
from model.engine.target import TargetModel
from scripts.gpu_check.simulated.device import SimulatedCuda
from tests.model.decoded import drafter_for, known, random_ids
from tests.model.families.families_with_trees import TREES
from tests.model.families.family import Family

PROMPT = [*random_ids(6), *random_ids(6)]
NUM_TOKENS = 8
EVERY = pytest.mark.parametrize("family", TREES, ids=lambda family: family.name)


def decoded(target: TargetModel) -> tuple[list[int], list[int]]:
    """Return the tokens and accept lengths of a short text."""
    found = generate(target, drafter_for("recycling", target), PROMPT, max_new_tokens=NUM_TOKENS)
    return found.token_ids, found.accept_lengths


@EVERY
def test_a_family_verifies_trees_on_a_gpu(family: Family, gpu: SimulatedCuda) -> None:
    known(family.name)
    expected = decoded(TargetModel(family.build(), use_kernels=False))
    with gpu:
        target = TargetModel(family.build().to("cuda"), use_kernels=False)
        self_test(target)
        assert target.chain_reason == ""
        assert decoded(target) == expected
