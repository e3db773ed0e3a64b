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


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype) -> None:
    gate, rows = (3 * torch.randn(1, 3, 41).to(dtype) for _ in range(2))
    found = ours.gated(gate, rows)
    assert_within_rounding(found, torch.nn.functional.silu(gate.double()) * rows.double())
    assert torch.equal(ours.gated(gate[:, 1:2], rows[:, 1:2]), found[:, 1:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_appends_to_a_cache(dtype: torch.dtype) -> None:
    query = torch.randn(1, 4, 3, 8).to(dtype)
    buffers = [torch.randn(1, 2, 12, size).to(dtype) for size in (8, 6)]
    new = [torch.randn(1, 3, 2, size).to(dtype).transpose(1, 2) for size in (8, 6)]
    mask = torch.zeros(1, 1, 3, 8)
    mask[..., 5:] = torch.full((3, 3), -torch.inf).triu(1)
    expected = [buffer.clone() for buffer in buffers]
    for buffer, rows in zip(expected, new, strict=True):
        buffer[:, :, 5:8] = rows
    in_use = [buffer[:, :, :8] for buffer in expected]
    for given, allowed in ((mask, mask), (torch.empty(0), None)):
        found = ours.attend_with_cache(query, *new, *buffers, given, 0.3, 5)
        assert torch.equal(found, ours.attend(query, *in_use, allowed, 0.3))
    for buffer, one in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, one)


def test_wrong_shapes_are_refused() -> None:
    for call in (
        lambda: ours.norm(torch.ones(2, 4), torch.ones(3), 1e-5, 0),
        lambda: ours.rotate(torch.ones(1, 2, 3, 5), torch.ones(1, 3, 5), torch.ones(1, 3, 5)),
        lambda: ours.few_rows_of_layers(torch.ones(2, 4), [torch.ones(3, 5)]),
        lambda: ours.gated(torch.ones(2, 4), torch.ones(2, 5)),
        lambda: ours.attend_with_cache(
            *[torch.ones(1, 1, 2, 4)] * 3, *[torch.ones(1, 1, 6, 4)] * 2, torch.empty(0), 1.0, 5
        ),
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
    program.operation("aten::narrow", "")
    program.value(4, True)
    program.constant(1)
    program.length()
    program.constant(3)
    program.result(5)
    layer = nn.Linear(4, 6, bias=False)
    rows = torch.randn(5, 4)
    with torch.inference_mode():
        (found,) = program.run([rows, layer.weight], 2, 1)
        expected = layer(rows).view(5, -1)
    assert torch.equal(found, torch.cat((expected, expected))[:, 1:4])
