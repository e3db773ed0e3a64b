"""The blockwise top-k is torch's.

Run: pytest tests/model/test_top_k.py
"""

from __future__ import annotations

import pytest
import torch

from model.top_k import BLOCK, SMALL, top_k


@pytest.mark.parametrize("width", [7, 1000, 8192, 32000, 50257, 16 * BLOCK + 5])
@pytest.mark.parametrize("num_rows", [1, 9, 81])
@pytest.mark.parametrize("k", [2, 7])
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
