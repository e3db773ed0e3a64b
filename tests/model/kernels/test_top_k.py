"""The k largest are torch's, by the kernel for few rows and block by block.

Run: pytest tests/model/kernels/test_top_k.py
"""

from __future__ import annotations

import pytest
import torch

from model.kernels import operations
from model.kernels.operations import BLOCK, SMALL, WIDE, top_k
from model.kernels.short_pass import short_pass_kernel


@pytest.fixture(autouse=True, params=["kernel", "blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find the largest in both ways."""
    if request.param == "blocks":
        monkeypatch.setattr(operations, "short_pass_kernel", lambda: None)
    elif not short_pass_kernel():
        pytest.skip("the kernels for few rows cannot be built here")
    monkeypatch.setattr(operations, "WIDE", 1)  # narrow rows, too, are for the kernel


@pytest.mark.parametrize("width", [7, 1000, 8192, 32000, 50257, 16 * BLOCK + 5])
@pytest.mark.parametrize("num_rows", [1, 9, 81])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_values_and_columns_are_those_of_torch(width: int, num_rows: int, k: int) -> None:
    # A permutation has no equal numbers, so that the columns are determined.
    rows = torch.stack(
        [
            torch.randperm(width, generator=torch.Generator().manual_seed(seed))
            for seed in range(num_rows)
        ]
    )
    values, columns = top_k(rows.float(), k)
    expected = rows.float().topk(k)
    assert torch.equal(values, expected.values)
    assert torch.equal(columns, expected.indices)


@pytest.mark.parametrize("column", [0, BLOCK - 1, BLOCK, SMALL + 3])
def test_ties_and_nan_are_found_wherever_they_are(column: int) -> None:
    logits = torch.zeros(2, SMALL + 5, dtype=torch.bfloat16)
    logits[0, column], logits[0, 5] = 3.0, 3.0
    logits[1, column] = float("nan")
    values, columns = top_k(logits, 2)
    assert values[0].tolist() == [3.0, 3.0]
    assert sorted(columns[0].tolist()) == sorted([column, 5])
    assert values[1, 0].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("order", ["rows", "columns"])
def test_any_dtype_and_layout(dtype: torch.dtype, order: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (
        torch.randn(WIDE + 3, 5, generator=generator).to(dtype).t()
    )  # many equal in half precision
    if order == "rows":
        logits = logits.contiguous()
    values, columns = top_k(logits, 9)
    assert torch.equal(values.to(dtype), logits.topk(9).values)
    assert torch.equal(logits.gather(1, columns), logits.topk(9).values)
    assert all(len(set(row)) == 9 for row in columns.tolist())


def test_numbers_that_are_none_come_first() -> None:
    logits = torch.zeros(3, WIDE)
    logits[0] = -torch.inf
    logits[1, [3, 50]] = torch.nan
    logits[1, 7] = torch.inf
    logits[2] = torch.nan
    values, columns = top_k(logits, 4)
    assert values[0].tolist() == [-torch.inf] * 4
    assert values[1].isnan().tolist() == [True, True, False, False]
    assert sorted(columns[1, :3].tolist()) == [3, 7, 50] and values[1, 2:].tolist() == [
        torch.inf,
        0,
    ]
    assert values[2].isnan().all()


def test_more_than_there_are_is_refused() -> None:
    message = "allowed: 1 to V" if operations.short_pass_kernel() else "range"
    with pytest.raises(RuntimeError, match=message):
        top_k(torch.zeros(2, WIDE), WIDE + 1)
