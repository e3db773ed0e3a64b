"""Attention: backends by queries, keys, groups of heads and alignment, and what a new length costs.

A backend that builds a plan for every number of keys shows it in the first call at a length: decoding has
a new length at every step.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from model.kernels.choice import Attend
from model.kernels.folded import MASK_ALIGNMENT, folded_products, folded_sdpa
from scripts.gpu_check.bench import Bench, Found, cell, one_line, time_once, times_of

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Queries, keys, calls that a time is the median of, lengths never seen, and heads for queries and keys with their
# size; fewer on the simulated device, where only the code is tried.
QUERIES, FEW_QUERIES = (1, 11, 81), (1, 5)
KEYS, FEW_KEYS = (512, 1024, 2048), (32,)
NUM_TIMED, NUM_NEW_LENGTHS = 20, 8
HEADS, FEW_HEADS = (32, 8, 128), (4, 2, 8)
OURS: dict[str, Attend] = {"folded": folded_sdpa, "products": folded_products}
# From how many milliseconds on a first call at a new length is a plan.
PLAN_MILLISECONDS = 2.0


class Case(NamedTuple):
    """The inputs on which attention is measured; one query has no mask, more have that of a tree."""

    name: str
    num_queries: int
    num_keys: int
    is_grouped: bool
    is_aligned: bool


def attention(bench: Bench, found: Found) -> None:
    """Time every backend where it works; what it refuses is no problem."""
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for case in bench.in_time(_cases(bench), found):
        try:
            rows.append({**case._asdict(), **_measured(bench, case)})
        except Exception as error:  # backends refuse shapes and devices in many ways
            refused[case.name] = one_line(error)
    found.figures |= {"rows": rows, "last_refusals": refused}
    found.figures["with_plans"] = sorted(
        {row["name"] for row in rows if row["new_length_ms"] > PLAN_MILLISECONDS}
    )
    if not rows:
        found.problems.append(f"no backend works: {refused}")
    names = ("attention", "queries", "keys", "grouped", "aligned mask")
    body = [
        [
            row["name"],
            str(row["num_queries"]),
            str(row["num_keys"]),
            "yes" if row["is_grouped"] else "",
            ("yes" if row["is_aligned"] else "no") if row["num_queries"] > 1 else "no mask",
            *(cell(row[key], 3) for key in ("host_ms", "device_ms", "new_length_ms")),
        ]
        for row in rows
    ]
    header = (*names, "host ms", "device ms", "+ ms at a new length")
    bench.show("attention of one layer, float16", header, body)


def _cases(bench: Bench) -> Iterator[Case]:
    queries = FEW_QUERIES if bench.is_simulated else QUERIES
    keys = FEW_KEYS if bench.is_simulated else KEYS
    for values in product((*BACKENDS, *OURS), queries, keys, *((False, True),) * 2):
        case = Case(*values)
        if case.num_queries > 1 or (case.is_aligned and case.name in BACKENDS):
            yield case


@torch.inference_mode()
def _measured(bench: Bench, case: Case) -> dict[str, float]:
    """Return the times of a case, and the median extra time of first calls at lengths never seen."""
    context = sdpa_kernel([BACKENDS[case.name]]) if case.name in BACKENDS else nullcontext()
    with warnings.catch_warnings(), context:
        warnings.simplefilter("ignore")  # torch's reasons why a backend refuses
        num_timed, num_lengths = (1, 2) if bench.is_simulated else (NUM_TIMED, NUM_NEW_LENGTHS)
        times = times_of(_call(bench, case), bench.device, num_timed)
        extra = []
        for more in range(1, 1 + num_lengths):
            call = _call(bench, case._replace(num_keys=case.num_keys + more))
            first, second = (time_once(call, bench.device) for _ in range(2))
            extra.append(first.total - second.total)
    found = {f"{name}_ms": value for name, value in times._asdict().items()}
    return {**found, "new_length_ms": statistics.median(extra)}


def _call(bench: Bench, case: Case) -> Callable[[], torch.Tensor]:
    """Return the attention of one layer over random numbers."""
    num_heads, num_key_heads, size = FEW_HEADS if bench.is_simulated else HEADS
    num_key_heads = num_key_heads if case.is_grouped else num_heads
    make = partial(torch.zeros, dtype=torch.float16, device=bench.device)
    query = make(1, num_heads, case.num_queries, size)
    key, value = (make(1, num_key_heads, case.num_keys, size) for _ in range(2))
    mask = None
    if case.num_queries > 1:
        step = MASK_ALIGNMENT
        # Rows of the mask begin at multiples of the step, or one place further each.
        width = -(-case.num_keys // step) * step + (not case.is_aligned)
        mask = make(1, 1, case.num_queries, width)[..., : case.num_keys]
    if case.name in OURS:
        assert mask is not None
        return partial(OURS[case.name], query, key, value, mask, size**-0.5)
    return partial(
        scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask=mask,
        enable_gqa=case.is_grouped,
    )
