"""Block 3: passes of the model by nodes and cached rows, eager and as graphs: host time, device time, bandwidth."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from model.budget.measure import draft_of
from model.engine.target import TargetModel
from scripts.benchmark.device_costs import bytes_of_token, copy_bandwidth
from scripts.gpu_check.bench import EAGER, Bench
from scripts.gpu_check.clock import Times, times_of
from scripts.gpu_check.findings import Findings, Table, cell

# Peak memory bandwidth in bytes a second, from NVIDIA's data sheets; the first name that the device's holds.
PEAKS = (
    *(("H200", 4.8e12), ("H100 PCIe", 2.0e12), ("H100 NVL", 3.9e12), ("H100", 3.35e12)),
    *(("A100 80GB PCIe", 1.935e12), ("A100-SXM4-80GB", 2.039e12), ("A100", 1.555e12)),
)
# The paper's tree of 80 nodes, and its root.
TREE = 81


def passes(bench: Bench) -> Findings:
    """Time passes of every kind of target."""
    found = Findings()
    eager = bench.target(EAGER)
    copied = copy_bandwidth(bench.device, eager.synchronize, bench.sizes.copy_bytes)
    peak = peak_bandwidth(torch.cuda.get_device_name(bench.device))
    rows: list[dict[str, Any]] = []
    sizes = bench.sizes
    for kind in bench.kinds:
        target = found.attempt(f"{kind} target", partial(bench.target, kind))
        if target is None:
            continue
        if kind != EAGER and type(target) is TargetModel:
            found.problems.append(f"{kind}: the model cannot be captured; see standard error")
        cases = [(nodes, context) for context in sizes.contexts for nodes in sizes.nodes]
        for nodes, context in bench.in_time(cases, found):
            what = f"{kind}, {nodes} nodes after {context}"
            times = found.attempt(what, partial(_timed, bench, target, nodes, context))
            if times is not None:
                read = bytes_of_token(eager, context)
                rows.append(_row((kind, nodes, context), times, read, copied, peak))
    found.figures |= {
        "rows": rows,
        "copy_gb_per_second": 1e-9 * copied,
        "peak_gb_per_second": None if peak is None else 1e-9 * peak,
        "tree_over_one": _ratios(rows),
    }
    found.tables.append(_table(rows))
    return found


def peak_bandwidth(name: str) -> float | None:
    """Return the peak memory bandwidth of a device; None if it is not known."""
    return next((peak for part, peak in PEAKS if part in name), None)


@torch.inference_mode()
def _timed(bench: Bench, target: TargetModel, nodes: int, context: int) -> Times:
    """Time a pass; what the cached rows hold does not matter for it."""
    cache = target.new_cache(context + nodes)
    call = partial(target.forward, draft_of(target, nodes), cache)
    restore = partial(cache.set_length, context)
    return times_of(call, bench.device, bench.sizes.num_timed, prepare=restore)


def _row(
    case: tuple[str, int, int], times: Times, num_bytes: int, copied: float, peak: float | None
) -> dict[str, Any]:
    kind, nodes, context = case
    bandwidth = num_bytes / (1e-3 * times.device)
    return {
        "kind": kind,
        "nodes": nodes,
        "context": context,
        **{f"{name}_ms": value for name, value in times._asdict().items()},
        "gb_per_second": 1e-9 * bandwidth,
        "share_of_copy": bandwidth / copied,
        "share_of_peak": None if peak is None else bandwidth / peak,
    }


def _ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the time of a tree's pass over that of one node, by kind and context."""
    device = {(row["kind"], row["context"], row["nodes"]): row["device_ms"] for row in rows}
    return {
        f"{kind} after {context}": milliseconds / device[kind, context, 1]
        for (kind, context, nodes), milliseconds in device.items()
        if nodes == TREE and (kind, context, 1) in device
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    header = ("target", "cached", "nodes", "host ms", "device ms", "total ms", "GB/s")
    body = [
        [
            row["kind"],
            str(row["context"]),
            str(row["nodes"]),
            *(cell(row[key], 3) for key in ("host_ms", "device_ms", "total_ms")),
            cell(row["gb_per_second"], 0),
            cell(row["share_of_copy"]),
            cell(row["share_of_peak"]),
        ]
        for row in rows
    ]
    title = "passes; device ms of eager ones include waiting for launches"
    return Table(title, (*header, "of copy", "of peak"), body)
