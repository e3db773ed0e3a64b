"""Small operations of a layer in one call each, and short programs of operations.

Run: pytest tests/model/kernels/test_row_operations.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from model.kernels.norms import KINDS
from model.kernels.short_pass import short_pass_kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ours = torch.ops.token_recycling


@pytest.fixture(autouse=True)
def _kernel() -> None:
    if not short_pass_kernel():
        pytest.skip("the kernels cannot be built here")
    torch.manual_seed(0)


def assert_within_rounding(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Check numbers against exact ones, float64, up to one rounding to their dtype."""
    steps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=steps, atol=4 * steps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("size", [8, 48, 100])
def test_norms(dtype: torch.dtype, kind: int, size: int) -> None:
    rows = (torch.randn(1, 5, size) + 0.5).to(dtype)
    weight = torch.rand(size).to(dtype)
    found = ours.norm(rows, weight, 1e-5, kind)
    assert_within_rounding(found, KINDS[kind](rows.double(), weight.double(), 1e-5))
    assert torch.equal(ours.norm(rows[:, 2:3], weight, 1e-5, kind), found[:, 2:3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_rotated(dtype: torch.dtype) -> None:
    heads = torch.randn(1, 7, 3, 16).to(dtype).transpose(1, 2)  # [1, H, n, D], as a view
    cosines, sines = (torch.randn(1, 7, 16).to(dtype) for _ in range(2))
    x, c, s = (one.double() for one in (heads, cosines[:, None], sines[:, None]))
    swapped = torch.cat((-x[..., 8:], x[..., :8]), dim=-1)
    assert_within_rounding(ours.rotate(heads, cosines, sines), x * c + swapped * s)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 9, 40])
def test_layers_that_share_their_inputs_have_the_same_bits_as_alone(
    dtype: torch.dtype, num_rows: int
) -> None:
    rows = torch.randn(1, num_rows, 700).to(dtype)
    weights = [torch.randn(size, 700).to(dtype) for size in (66, 3, 130)]
    for found, weight in zip(ours.few_rows_of_layers(rows, weights), weights, strict=True):
        assert torch.equal(found, ours.few_rows(rows, weight, None))


def test_wrong_shapes_are_refused() -> None:
    for call in (
        lambda: ours.norm(torch.ones(2, 4), torch.ones(3), 1e-5, 0),
        lambda: ours.rotate(torch.ones(1, 2, 3, 5), torch.ones(1, 3, 5), torch.ones(1, 3, 5)),
        lambda: ours.few_rows_of_layers(torch.ones(2, 4), [torch.ones(3, 5)]),
    ):
        with pytest.raises(RuntimeError, match=r"got .*allowed"):
            call()


def test_a_program_runs_its_operations_in_order() -> None:
    program = torch.classes.token_recycling.Program()
    program.operation("aten::linear", "")
    for index in (0, 1):
        program.value(index, False)
    program.constant(None)
    program.operation("aten::view", "")
    program.value(2, True)
    program.list(2, False)
    program.rows(2, 1)
    program.constant(-1)
    program.operation("aten::cat", "")
    program.list(2, True)
    program.value(3, False)
    program.value(3, True)
    program.constant(0)
    program.result(4)
    layer = nn.Linear(4, 6, bias=False)
    rows = torch.randn(5, 4)
    with torch.inference_mode():
        (found,) = program.run([rows, layer.weight], 2)
        expected = layer(rows).view(5, -1)
    assert torch.equal(found, torch.cat((expected, expected)))
