"""Block 2: attention backends by queries, keys, groups of heads and alignment, and what a new length costs.

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
from scripts.gpu_check.bench import Bench
from scripts.gpu_check.clock import Times, time_once, times_of
from scripts.gpu_check.findings import Findings, Table, cell, one_line

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
OURS: dict[str, Attend] = {"folded": folded_sdpa, "products": folded_products}
# From how many milliseconds on a first call at a new length is a plan.
A_PLAN = 2.0


class Case(NamedTuple):
    """The inputs on which attention is measured; one query has no mask, more have that of a tree."""

    name: str
    num_queries: int
    num_keys: int
    is_grouped: bool
    is_aligned: bool


def attention(bench: Bench) -> Findings:
    """Time every backend where it works; what it refuses is no problem."""
    found = Findings()
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for case in bench.in_time(_cases(bench), found):
        try:
            rows.append({**case._asdict(), **_measured(bench, case)})
        except Exception as error:  # backends refuse shapes and devices in many ways
            refused[case.name] = one_line(error)
    found.figures |= {"rows": rows, "last_refusals": refused}
    found.figures["with_plans"] = sorted(
        {row["name"] for row in rows if row["new_length_ms"] > A_PLAN}
    )
    if not rows:
        found.problems.append(f"no backend works: {refused}")
    found.tables.append(_table(rows))
    return found


def _cases(bench: Bench) -> Iterator[Case]:
    sizes = bench.sizes
    for values in product((*BACKENDS, *OURS), sizes.queries, sizes.keys, *((False, True),) * 2):
        case = Case(*values)
        if case.num_queries > 1 or (case.is_aligned and case.name in BACKENDS):
            yield case


@torch.inference_mode()
def _measured(bench: Bench, case: Case) -> dict[str, float]:
    """Return the times of a case, and the median extra time of first calls at lengths never seen."""
    context = sdpa_kernel([BACKENDS[case.name]]) if case.name in BACKENDS else nullcontext()
    with warnings.catch_warnings(), context:
        warnings.simplefilter("ignore")  # torch's reasons why a backend refuses
        times = times_of(_call(bench, case), bench.device, bench.sizes.num_timed)
        extra = []
        for more in range(1, 1 + bench.sizes.num_new_lengths):
            call = _call(bench, case._replace(num_keys=case.num_keys + more))
            first, second = (time_once(call, bench.device) for _ in range(2))
            extra.append(first.total - second.total)
    return {**_in_milliseconds(times), "new_length_ms": statistics.median(extra)}


def _in_milliseconds(times: Times) -> dict[str, float]:
    return {f"{name}_ms": value for name, value in times._asdict().items()}


def _call(bench: Bench, case: Case) -> Callable[[], torch.Tensor]:
    """Return the attention of one layer over random numbers."""
    num_heads, num_key_heads, size = bench.sizes.heads
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


def _table(rows: list[dict[str, Any]]) -> Table:
    names = ("attention", "queries", "keys", "grouped", "aligned mask")
    header = (*names, "host ms", "device ms", "+ ms at a new length")
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
    return Table("attention of one layer, float16", header, body)
