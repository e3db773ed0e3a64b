"""Fused passes as graphs: a simulated GPU runs their kernels by Triton's interpreter, a real one compiles them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from model.backends.fused import fused_pass, proof
from model.backends.graphs import graphed_target
from model.backends.graphs.graphed_target import GraphedTarget, graphed
from model.engine.loop import decode, generate
from tests.interpreted import quick_interpreter
from tests.model.decoded import drafter_for, known, random_ids
from tests.simulated_device.conftest import HAS_GPU
from tests.simulated_device.demo import Costs
from tests.simulated_device.runs import Runs

LLAMA = "Llama, grouped heads"
PROMPT = random_ids(9, seed=2)
# Interpreted, a draft of 80 nodes takes ten seconds.
METHODS = ("hybrid", "recycling-averaged", "recycling", "suffix") if HAS_GPU else ("hybrid",)
NUM_LAYERS, KERNELS_OF_A_LAYER = 2, 9
# Beside those of the layers: where nodes are, the embedding, the last norm and the head; what the host uploads and
# reads; moves of rows, the start of a sequence, and logits that are kept.
OTHER_KERNELS = 16


@pytest.fixture(scope="module")
def on_device(device_runs: Runs) -> Iterator[Runs]:
    """A GPU on which passes are fused."""
    with pytest.MonkeyPatch.context() as patch, fused_on(device_runs, patch):
        yield device_runs


def fused_on(device_runs: Runs, patch: pytest.MonkeyPatch) -> AbstractContextManager[object]:
    """Fuse passes on a GPU until the patch is undone; return what shows the GPU to torch."""
    pytest.importorskip("triton")
    gpu = device_runs.gpu
    if gpu is not None:
        from model.backends.fused import kernels

        quick_interpreter(patch)

        def launched(
            name: str, grid: tuple[int, ...], given: Sequence[Any], options: Mapping[str, Any]
        ) -> None:
            places = [index for index, one in enumerate(given) if isinstance(one, torch.Tensor)]

            def call(*tensors: torch.Tensor) -> None:
                held = dict(zip(places, tensors, strict=True))
                kernel: Callable[..., object] = getattr(kernels, name)[grid]
                kernel(*(held.get(index, one) for index, one in enumerate(given)), **options)

            gpu.run_written(name, call, [given[index] for index in places])

        patch.setattr(fused_pass, "launched", launched)
        # An interpreted row takes a tenth of a second; what is proved without a GPU has tests of its own.
        patch.setattr(proof, "SIZES", (3,))
        patch.setattr(proof, "BASES", ())
        patch.setattr(proof, "NUM_TOKENS", 9)
        patch.setattr(graphed_target, "why_unavailable", lambda device: "")
    return device_runs.on_device()


@pytest.fixture(scope="module")
def target(on_device: Runs) -> GraphedTarget:
    found = graphed(known(LLAMA).build().half().to("cuda"), say=pytest.fail)
    assert isinstance(found, GraphedTarget) and found.fused is not None, found
    return found


def test_a_pass_is_one_graph_of_nine_kernels_a_layer(
    target: GraphedTarget, on_device: Runs
) -> None:
    costs, steps = (
        Costs(),
        decode(target, drafter_for("vanilla", target), PROMPT, max_new_tokens=8),
    )
    gpu = on_device.gpu
    if gpu is None:
        pytest.skip("launches are counted on a simulated device")
    for place, _ in enumerate(steps):
        if place > 3:  # after its first calls, which are captured
            costs.add(gpu.accounts)
        gpu.accounts.clear()
    assert (costs.launches, sum(costs.waits.values())) == (2, 1)
    assert costs.kernels <= NUM_LAYERS * KERNELS_OF_A_LAYER + OTHER_KERNELS


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_tokens_of_plain_decoding(method: str, target: GraphedTarget) -> None:
    options = {"budget": "fixed", "num_nodes": 7} if method == "hybrid" else {}
    drafter = drafter_for(method, target, **options)
    plain = generate(target, drafter_for("vanilla", target), PROMPT, max_new_tokens=8)
    found = generate(target, drafter, PROMPT, max_new_tokens=8)
    assert found.token_ids == plain.token_ids


def test_a_gpu_proves_the_same_bits(target: GraphedTarget, on_device: Runs) -> None:
    if on_device.gpu is not None:
        pytest.skip("products of numpy have other bits for other shapes")
    assert target.fused is not None and target.fused.has_same_bits, target.fused
