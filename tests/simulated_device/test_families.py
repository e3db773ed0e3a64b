"""Every family whose models verify trees, on a simulated GPU: the logits of plain passes at every node.

Replayed as graphs, too, but for a few whose own code asks the device for numbers, or brings some from the host.
"""

from __future__ import annotations

import pytest

from model.backends.graphs.graphed_target import GraphedTarget, graphed
from model.backends.proofs.packing import batch_of, why_not_packed
from model.backends.proofs.self_test import self_test
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.engine.sequence import Request
from tests.model.decoded import drafter_for, known, random_ids
from tests.model.families.families_with_trees import TREES
from tests.model.families.family import IS_VERSION_4, Family
from tests.simulated_device.device import SimulatedCuda

EVERY = pytest.mark.parametrize(
    "family",
    [family for family in TREES if family.expected == "trees"],
    ids=lambda family: family.name,
)
# What their own passes do that no graph can hold.
NOT_CAPTURED = {
    "Falcon, rotary": "H2D copy",
    "JetMoe": "tolist",
    "Llama, dynamic rope": "_local_scalar_dense",
    "PhiMoE": "H2D copy",
    "XGLM": "_local_scalar_dense",
}
# Whose texts cannot share passes.
IN_TURN = ("Llama 4 text", "Llama, dynamic rope", "Ministral 3", "Phi 3, longrope")
PROMPT = [*random_ids(6), *random_ids(6)]
NUM_TOKENS = 6
# With the root as many nodes as the tree of the self-test.
SMALL_TREES = {"budget": "fixed", "num_nodes": 12}


def decoded(target: TargetModel) -> tuple[list[int], list[int]]:
    """Return the tokens and accept lengths of a short text."""
    drafter = drafter_for("hybrid", target, **SMALL_TREES)
    found = generate(target, drafter, PROMPT, max_new_tokens=NUM_TOKENS)
    return found.token_ids, found.accept_lengths


def batch_of_two(target: TargetModel) -> list[list[int]]:
    """Return the tokens of the same text twice, in a batch."""
    drafter = drafter_for("hybrid", target, **SMALL_TREES)
    batch, found = batch_of(target, drafter, 2), [list[int](), list[int]()]
    for key in range(2):
        batch.add(key, Request(PROMPT, NUM_TOKENS))
    while len(batch):
        for event in batch.step():
            assert event.record, event.error
            found[event.key] += event.record.tokens
    return found


@EVERY
def test_a_family_verifies_trees_on_a_gpu(family: Family, gpu: SimulatedCuda) -> None:
    known(family.name)
    with gpu:
        target = TargetModel(family.build().to("cuda"), use_kernels=False)
        self_test(target)
        assert target.chain_reason == ""


@EVERY
def test_a_family_decodes_as_graphs_as_on_the_cpu(
    family: Family, gpu: SimulatedCuda, caplog: pytest.LogCaptureFixture
) -> None:
    known(family.name)
    expected = decoded(TargetModel(family.build(), use_kernels=False))
    lines: list[str] = []
    with gpu:
        target = graphed(family.build().to("cuda"), use_kernels=False, say=lines.append)
        if IS_VERSION_4:  # whose models ask the device for numbers more often
            assert isinstance(target, GraphedTarget) == (not lines)
        elif family.name in NOT_CAPTURED:
            assert not isinstance(target, GraphedTarget)
            assert f"{NOT_CAPTURED[family.name]}: at model/backends/" in lines[0]
        else:
            assert isinstance(target, GraphedTarget)
        self_test(target)
        assert target.chain_reason == ""
        assert decoded(target) == expected
        assert bool(why_not_packed(target)) == (family.name in IN_TURN)
        assert batch_of_two(target) == [expected[0]] * 2
        assert "kernel by kernel" not in caplog.text
