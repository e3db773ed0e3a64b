"""The attention kernel for few queries: exact, the same bits beside any other queries, any layout.

Run: pytest tests/model/kernels/test_short_attention.py
"""

from __future__ import annotations

import pytest
import torch

from model.kernels.short_pass import DTYPES, short_pass_kernel

SHAPES = {  # H, K, n, T, D, E
    "one query": (4, 4, 1, 300, 64, 64),
    "grouped heads, odd sizes": (8, 2, 9, 77, 40, 24),
    "one key": (3, 1, 5, 1, 7, 64),
    "more queries than keys": (16, 16, 33, 13, 80, 80),
    "one head of keys": (8, 1, 2, 64, 128, 128),
    "more rows than a task has": (8, 2, 45, 50, 16, 24),
}


@pytest.fixture(autouse=True)
def _kernel() -> None:
    if not short_pass_kernel():
        pytest.skip("the kernels cannot be built here")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 0.3,
) -> torch.Tensor:
    """Return the kernel's result [1, n, H, E]."""
    found: torch.Tensor = torch.ops.token_recycling.attend(query, key, value, mask, scale)
    return found


def exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return attention in float64, step by step."""
    group = query.shape[1] // key.shape[1]
    keys, values = (
        rows.double().repeat_interleave(group, dim=1) for rows in (key, value)
    )  # [1, H, T, D], [1, H, T, E]
    scores = 0.3 * query.double() @ keys.transpose(2, 3)  # [1, H, n, T]
    if mask is not None:
        is_boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_boolean else scores + mask.double()
    return (scores.softmax(dim=-1) @ values).transpose(1, 2)


def random_inputs(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value of one of `SHAPES`."""
    num_heads, num_key_heads, n, num_keys, key_size, value_size = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    sizes = (
        (1, num_heads, n, key_size),
        (1, num_key_heads, num_keys, key_size),
        (1, num_key_heads, num_keys, value_size),
    )
    query, key, value = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return query, key, value


def random_mask(n: int, num_keys: int) -> torch.Tensor:
    """Return a random mask in which each query sees at least one key: boolean [1, 1, n, T]."""
    generator = torch.Generator().manual_seed(n)
    mask = torch.rand(1, 1, n, num_keys, generator=generator) < 0.6
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("mask_kind", ["none", "boolean", "additive", "biased"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_sums_in_float32_and_rounds_once(name: str, dtype: torch.dtype, mask_kind: str) -> None:
    query, key, value = random_inputs(name, dtype)
    seen = random_mask(query.shape[2], key.shape[2])
    masks = {
        "none": None,
        "boolean": seen,
        "additive": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min).to(dtype),
        "biased": torch.randn(seen.shape).to(dtype),
    }
    mask = masks[mask_kind]
    found = attend(query, key, value, mask)
    assert found.dtype == dtype and found.is_contiguous()
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(found.double(), exact(query, key, value, mask), **tolerance)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_has_the_same_bits_beside_any_others(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    count_all = 50  # three heads share keys: 150 rows, in several tasks
    query = torch.randn(1, 6, count_all, 40).to(dtype)
    key, value = torch.randn(1, 2, 130, 40).to(dtype), torch.randn(1, 2, 130, 48).to(dtype)
    mask = random_mask(count_all, 130)
    together = attend(query, key, value, mask)
    try:
        torch.set_num_threads(threads)
        for count in (*range(1, 9), 16, 49):
            for first in (0, 1, count_all - count):
                some = slice(first, first + count)
                part = attend(query[:, :, some], key, value, mask[:, :, some])
                assert torch.equal(part, together[:, some]), count
        for heads in (slice(0, 3), slice(3, 6)):
            part = attend(
                query[:, heads], *(rows[:, heads.start // 3, None] for rows in (key, value)), mask
            )
            assert torch.equal(part, together[:, :, heads])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [1, 6])
def test_causal_queries_have_the_bits_of_single_ones(
    dtype: torch.dtype, threads: int, num_heads: int
) -> None:
    before = torch.get_num_threads()
    count = 130  # in several tasks, some across two heads
    query = torch.randn(1, num_heads, count, 40).to(dtype)
    num_key_heads = max(1, num_heads // 3)
    key = torch.randn(1, num_key_heads, count + 5, 40).to(dtype)
    value = torch.randn(1, num_key_heads, count + 5, 48).to(dtype)
    try:
        torch.set_num_threads(threads)
        for num_keys in (count, count + 5):
            rows = key[:, :, :num_keys], value[:, :, :num_keys]
            found = torch.ops.token_recycling.attend(query, *rows, None, 0.3, True)
            for i in range(count):
                seen = num_keys - count + i + 1
                alone = attend(query[:, :, i : i + 1], key[:, :, :seen], value[:, :, :seen])
                assert torch.equal(found[:, i : i + 1], alone), (num_keys, i)
    finally:
        torch.set_num_threads(before)


def test_causal_queries_need_as_many_keys() -> None:
    query, rows = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match=r"attend: got .*; allowed: .*causal with n up to T"):
        torch.ops.token_recycling.attend(query, rows, rows, None, 1.0, True)


@pytest.mark.parametrize("blocked", [-torch.inf, torch.finfo(torch.float32).min])
def test_keys_that_are_not_seen_change_no_bit(blocked: float) -> None:
    query, key, value = random_inputs("grouped heads, odd sizes", torch.float32)
    alone = attend(query, key, value)
    for before, after in ((1, 0), (0, 51), (6, 7)):  # wherever the seen ones stand
        rows = []
        for seen in (key, value):
            others = 100 * torch.randn(1, 2, before + after, seen.shape[-1])
            rows.append(torch.cat((seen[:, :, :40], others, seen[:, :, 40:]), dim=2))
        mask = torch.zeros(1, 1, 9, 77 + before + after)
        mask[..., 40 : 40 + before + after] = blocked
        assert torch.equal(attend(query, *rows, mask), alone)


def test_a_query_that_sees_nothing_attends_to_zeros() -> None:
    query, key, value = random_inputs("grouped heads, odd sizes", torch.float32)
    mask = torch.ones(1, 1, 9, 77, dtype=torch.bool)
    mask[:, :, 4] = False
    found = attend(query, key, value, mask)
    assert not found[:, 4].any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[:, others], attend(query, key, value)[:, others])


def test_tensors_need_not_be_in_order() -> None:
    query, key, value = random_inputs("one head of keys", torch.float32)
    expected = attend(query, key, value)
    rows_first = query.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(1, 2, 100, 130)
    wide[:, 1:, 20:84, :128] = key
    columns = value.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(attend(rows_first, wide[:, 1:, 20:84, :128], columns), expected)
    assert attend(query[:, :, :0], key, value).shape == (1, 0, 8, 128)


@pytest.mark.parametrize(
    ("change", "mask"),
    [
        ({"query": (2, 4, 3, 8)}, None),
        ({"query": (1, 3, 3, 8)}, None),
        ({"key": (1, 2, 5, 7)}, None),
        ({"value": (1, 2, 4, 8)}, None),
        ({"key": (1, 2, 0, 8), "value": (1, 2, 0, 8)}, None),
        ({}, (1, 4, 3, 5)),
        ({}, (1, 1, 3, 6)),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, tuple[int, ...]], mask: tuple[int, ...] | None
) -> None:
    sizes = {"query": (1, 4, 3, 8), "key": (1, 2, 5, 8), "value": (1, 2, 5, 8), **change}
    tensors = {name: torch.randn(size) for name, size in sizes.items()}
    with pytest.raises(RuntimeError, match=r"attend: got .*; allowed: "):
        attend(**tensors, mask=None if mask is None else torch.zeros(mask))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64,) * 2])
def test_other_dtypes_are_refused(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    query, key, value = random_inputs("one query", torch.float32)
    with pytest.raises(RuntimeError, match=r"attend: got .*; allowed: "):
        attend(query.to(dtypes[0]), key.to(dtypes[1]), value.to(dtypes[1]))


def test_a_compiler_knows_its_shapes_and_copies_nothing() -> None:
    operator = torch.ops.token_recycling.attend.default
    query, key, value = random_inputs("grouped heads, odd sizes", torch.float32)
    torch.library.opcheck(
        operator, (query, key, value, None, 0.3), test_utils=("test_schema", "test_faketensor")
    )
    # Without it inductor copies the cache to give it strides it need not have.
    assert torch.Tag.flexible_layout in operator.tags
