"""Weights in the blocks of GGUF files: the numbers that `gguf` unpacks, and products with the bits of theirs.

Run: pytest tests/model/kernels/test_quantised_weights.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from model.kernels.short_pass import DTYPES, has_bfloat16_units, short_pass_kernel
from tests.tracer import ROOT

gguf = pytest.importorskip("gguf")

ours = torch.ops.token_recycling
OUTPUTS = 37
# Bytes of a block, its numbers, and where its scales in half precision are.
TYPES = {
    "Q4_0": (18, 32, [0]),
    "Q4_1": (20, 32, [0, 2]),
    "Q5_0": (22, 32, [0]),
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


def random_weight(
    name: str, inputs: int, outputs: int = OUTPUTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return any weight of a type in blocks, and its numbers by `gguf`."""
    generator = np.random.default_rng(0)
    if name == INT8:
        scales = generator.normal(0, 0.01, (outputs, inputs // 32, 1)).astype(np.float32)
        whole = generator.integers(-128, 128, (outputs, inputs // 32, 32), dtype=np.int8)
        blocks = np.concatenate((scales.view(np.uint8), whole.view(np.uint8)), axis=2)
        return torch.from_numpy(blocks), torch.from_numpy((scales * whole).reshape(outputs, inputs))
    num_bytes, size, places = TYPES[name]
    blocks = generator.integers(0, 256, (outputs, inputs // size, num_bytes), dtype=np.uint8)
    for place in places:
        numbers = generator.normal(0, 0.01, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[:, :, place : place + 2] = numbers.view(np.uint8)
    rows = blocks.reshape(outputs, -1)
    numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    return torch.from_numpy(blocks), torch.from_numpy(numbers.reshape(outputs, inputs))


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


def in_eight_bits(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as each 32 numbers are rounded to whole numbers with a scale, in float64."""
    parts = rows.float().reshape(*rows.shape[:-1], -1, 32)
    largest = parts.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, torch.zeros_like(largest))
    whole = (parts * inverse).round().double() * (largest / 127).double()
    return whole.reshape(rows.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*TYPES, INT8])
def test_whole_numbers_are_multiplied_exactly_and_rows_keep_their_bits(
    name: str, dtype: torch.dtype
) -> None:
    blocks, numbers = random_weight(name, 768, 48)
    packed = ours.packed(blocks)
    rows, bias = torch.randn(33, 768, dtype=dtype), torch.randn(48, dtype=dtype)
    rows[3] = 0
    rows[4, 5] = 1000
    together = ours.few_rows(rows, packed, bias)
    expected = in_eight_bits(rows) @ numbers.double().T + bias.double()
    size = expected.abs().amax()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert float((together.double() - expected).abs().amax()) < tolerance * float(size)
    assert not torch.equal(together, ours.few_rows(rows, blocks, bias)), "another arithmetic"
    for num_rows in (*range(1, 10), 16, 33):
        for first in (0, 33 - num_rows):
            part = slice(first, first + num_rows)
            assert torch.equal(ours.few_rows(rows[part], packed, bias), together[part]), num_rows
    parts = ours.few_rows_of_layers(rows, [packed, packed])
    assert all(torch.equal(part, ours.few_rows(rows, packed, None)) for part in parts)
    for kind in DTYPES:
        assert torch.equal(ours.dequantised(packed, kind), numbers.to(kind))


def test_what_cannot_be_repacked_is_refused() -> None:
    blocks, numbers = random_weight("Q4_1", 64)
    for weight in (blocks, numbers):
        with pytest.raises(RuntimeError, match=r"packed: got .*; allowed: weights in blocks, with"):
            ours.packed(weight)


WRITE = """
import sys, torch
from tests.model.kernels.test_quantised_weights import INT8, TYPES, products_in_whole_numbers
torch.save(products_in_whole_numbers(), sys.argv[1])
"""


def products_in_whole_numbers() -> dict[str, torch.Tensor]:
    assert short_pass_kernel()
    rows = torch.randn(7, 768, generator=torch.Generator().manual_seed(1))
    names = [*TYPES, INT8]
    weights = {name: ours.packed(random_weight(name, 768, 48)[0]) for name in names}
    return {name: ours.few_rows(rows, weight, None) for name, weight in weights.items()}


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="there is one set of instructions"
)
def test_whole_numbers_have_the_same_bits_with_any_instructions(tmp_path: Path) -> None:
    file = tmp_path / "found.pt"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    words = [sys.executable, "-c", WRITE, str(file)]
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    for name, found in torch.load(file).items():
        assert torch.equal(found, products_in_whole_numbers()[name]), name


def test_rows_that_are_no_numbers_stay_so() -> None:
    blocks, _ = random_weight("Q4_1", 64, 16)
    rows = torch.randn(3, 64)
    rows[1, 40] = float("nan")
    found = ours.few_rows(rows, ours.packed(blocks), None)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
