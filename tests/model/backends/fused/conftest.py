"""Fused passes on a CPU: kernels run by Triton's interpreter, and calls that are not captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from model.backends.fused import proof
from model.backends.graphs import graphed_target
from model.backends.graphs.captured import CapturedCalls
from model.backends.graphs.graphed_target import GraphedTarget
from tests.interpreted import quick_interpreter


@pytest.fixture
def fused_target(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], GraphedTarget]:
    """Return what makes a target of a model on the CPU, as on a GPU that is interpreted."""
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled here")
    numpy = pytest.importorskip("numpy")
    interpreter = quick_interpreter(monkeypatch)

    def as_float64(handle: Any) -> Any:
        data = handle.data
        if str(handle.dtype.scalar) == "bf16":  # of which numpy knows the bits alone
            data = (data.astype(numpy.uint32) << 16).view(numpy.float32)
        return data.astype(numpy.float64)

    def exact_product(self: Any, one: Any, other: Any, sums: Any, *_: Any) -> Any:
        """Multiply in float64, rounded once: BLAS's sums have another order for every shape."""
        wide = numpy.matmul(as_float64(one), as_float64(other))
        found = wide.astype(sums.data.dtype) + sums.data
        return interpreter.TensorHandle(found, sums.dtype.scalar)

    def run(self: CapturedCalls, key: Hashable, call: Callable[[], Any]) -> Any:
        return call()

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", exact_product)
    # An interpreted row takes a tenth of a second.
    monkeypatch.setattr(proof, "SIZES", (3, 20))
    monkeypatch.setattr(proof, "BASES", ())
    monkeypatch.setattr(proof, "NUM_TOKENS", 20)
    monkeypatch.setattr(CapturedCalls, "run", run)
    monkeypatch.setattr(graphed_target, "why_unavailable", lambda device: "")
    return GraphedTarget
