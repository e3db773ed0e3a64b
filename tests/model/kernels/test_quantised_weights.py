"""Weights in the blocks of GGUF files: the numbers that `gguf` unpacks, and products with the bits of theirs.

Run: pytest tests/model/kernels/test_quantised_weights.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.kernels.short_pass import DTYPES, has_bfloat16_units, short_pass_kernel

gguf = pytest.importorskip("gguf")

ours = torch.ops.token_recycling
OUTPUTS = 37
# Bytes of a block, its numbers, and where its scales in half precision are.
TYPES = {
    "Q4_0": (18, 32, [0]),
    "Q4_1": (20, 32, [0, 2]),
    "Q8_0": (34, 32, [0]),
    "Q4_K": (144, 256, [0, 2]),
    "Q6_K": (210, 256, [208]),
}
INT8 = "int8"  # torchao's: a scale in float32 and whole numbers


@pytest.fixture(autouse=True)
def _kernel() -> None:
    if not short_pass_kernel():
        pytest.skip("the kernels cannot be built here")
    torch.manual_seed(0)


def random_weight(name: str, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return any weight of a type in blocks, and its numbers by `gguf`."""
    generator = np.random.default_rng(0)
    if name == INT8:
        scales = generator.normal(0, 0.01, (OUTPUTS, inputs // 32, 1)).astype(np.float32)
        whole = generator.integers(-128, 128, (OUTPUTS, inputs // 32, 32), dtype=np.int8)
        blocks = np.concatenate((scales.view(np.uint8), whole.view(np.uint8)), axis=2)
        return torch.from_numpy(blocks), torch.from_numpy((scales * whole).reshape(OUTPUTS, inputs))
    num_bytes, size, places = TYPES[name]
    blocks = generator.integers(0, 256, (OUTPUTS, inputs // size, num_bytes), dtype=np.uint8)
    for place in places:
        numbers = generator.normal(0, 0.01, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[:, :, place : place + 2] = numbers.view(np.uint8)
    rows = blocks.reshape(OUTPUTS, -1)
    numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    return torch.from_numpy(blocks), torch.from_numpy(numbers.reshape(OUTPUTS, inputs))


def product(rows: torch.Tensor, numbers: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product with dequantised weights: in float32, or in bfloat16 by the units for it."""
    if rows.dtype == torch.bfloat16 and has_bfloat16_units():
        return ours.few_rows(rows, numbers.bfloat16(), bias)
    bias = None if bias is None else bias.float()
    return ours.few_rows(rows.float(), numbers, bias).to(rows.dtype)


@pytest.mark.parametrize("name", [*TYPES, INT8])
def test_the_numbers_are_those_that_gguf_or_torchao_unpacks(name: str) -> None:
    blocks, numbers = random_weight(name, 768)
    for dtype in DTYPES:
        assert torch.equal(ours.dequantised(blocks, dtype), numbers.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [256, 1536, 2048])  # in one, two and three blocks of inputs
@pytest.mark.parametrize("name", [*TYPES, INT8])
def test_a_product_has_the_bits_of_that_with_the_dequantised_weights(
    name: str, inputs: int, dtype: torch.dtype
) -> None:
    blocks, numbers = random_weight(name, inputs)
    rows, bias = torch.randn(33, inputs, dtype=dtype), torch.randn(OUTPUTS, dtype=dtype)
    together = product(rows, numbers, bias)
    for num_rows in (*range(1, 10), 16, 33):
        for first in (0, 33 - num_rows):
            part = slice(first, first + num_rows)
            assert torch.equal(ours.few_rows(rows[part], blocks, bias), together[part]), num_rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_run_in_float32_and_are_rounded_once(dtype: torch.dtype) -> None:
    blocks, numbers = random_weight("Q4_1", 768)
    rows = torch.randn(1, 3, 768).to(dtype)
    found = ours.few_rows(rows, blocks, None)
    assert torch.equal(found, product(rows, numbers, None))
    if has_bfloat16_units() and dtype == torch.bfloat16:  # weights are rounded too: 8 bits each
        numbers = numbers.bfloat16().float()
    torch.testing.assert_close(found.float(), rows.float() @ numbers.T, rtol=2**-7, atol=1e-2)


def test_layers_of_several_types_share_a_call() -> None:
    weights = [random_weight(name, 256) for name in ("Q4_K", "Q6_K", "Q4_K")]
    rows = torch.randn(5, 256)
    found = ours.few_rows_of_layers(rows, [blocks for blocks, _ in weights])
    for one, (_, numbers) in zip(found, weights, strict=True):
        assert torch.equal(one, ours.few_rows(rows, numbers, None))


@pytest.mark.parametrize(
    ("blocks", "inputs"), [((3, 2, 19), 64), ((3, 2, 18), 32), ((3, 0, 18), 0)]
)
def test_other_blocks_and_rows_are_refused(blocks: tuple[int, ...], inputs: int) -> None:
    with pytest.raises(RuntimeError, match=r"got .*; allowed: "):
        ours.few_rows(torch.randn(2, inputs), torch.zeros(blocks, dtype=torch.uint8), None)


def test_quantised_and_other_layers_do_not_share_a_call() -> None:
    blocks, numbers = random_weight("Q8_0", 256)
    with pytest.raises(RuntimeError, match=r"got quantised and other weights; allowed: "):
        ours.few_rows_of_layers(torch.randn(2, 256), [blocks, numbers])
