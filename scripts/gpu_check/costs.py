"""Costs on the device: its facts, bandwidth and launches, and passes by nodes and cached rows."""

from __future__ import annotations

import subprocess
from functools import partial
from typing import Any

import torch

from model.budget.measure import draft_of
from model.commands.device import SMI_SECONDS
from model.engine.target import TargetModel
from model.kernels.norms import has_fused_rms_norm
from model.kernels.sdpa import sdpa_backends
from scripts.benchmark.device_costs import COPY_BYTES, bytes_of_token, copy_bandwidth
from scripts.gpu_check.bench import (
    EAGER,
    KINDS,
    NUM_WARM,
    Bench,
    Found,
    Times,
    cell,
    time_once,
    times_of,
)

# Empty kernels, nodes and cached rows of passes, and calls that a time is the median of; fewer on the simulated
# device, where only the code is tried.
NUM_LAUNCHES, FEW_LAUNCHES = 10_000, 20
FEW_BYTES = 2**16
NODES, FEW_NODES = (1, 8, 16, 32, 64, 81, 88, 128), (1, 81)
CONTEXTS, FEW_CONTEXTS = (512, 1536), (40,)
NUM_TIMED = 20
# Peak memory bandwidth in bytes a second, from NVIDIA's data sheets; the first name that the device's holds.
PEAKS = (
    *(("H200", 4.8e12), ("H100 PCIe", 2.0e12), ("H100 NVL", 3.9e12), ("H100", 3.35e12)),
    *(("A100 80GB PCIe", 1.935e12), ("A100-SXM4-80GB", 2.039e12), ("A100", 1.555e12)),
)
# The paper's tree of 80 nodes, and its root.
TREE = 81
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,pstate,clocks.sm,clocks.mem,power.limit,temperature.gpu,memory.used",
    "--format=csv,noheader",
)


def device_facts(bench: Bench, found: Found) -> None:
    """Name device and software, and measure how fast it copies and launches."""
    facts: dict[str, Any] = found.figures
    attempts = {
        "nvidia_smi": _nvidia_smi,
        "name": lambda: torch.cuda.get_device_name(bench.device),
        "capability": lambda: "sm_{}{}".format(*torch.cuda.get_device_capability(bench.device)),
        "processors": lambda: torch.cuda.get_device_properties(bench.device).multi_processor_count,
        "torch": lambda: str(torch.__version__),
        "cuda": lambda: torch.version.cuda,
        "cudnn": torch.backends.cudnn.version,
        "sdpa": lambda: sdpa_backends(bench.device),
        "fused_rms_norm": has_fused_rms_norm,
        "memory_bytes_free_and_total": lambda: list(torch.cuda.mem_get_info(bench.device)),
        "copy_gb_per_second": lambda: 1e-9 * _copied(bench),
        "launch_microseconds_eager": lambda: _launch(bench, in_graph=False),
        "launch_microseconds_in_graph": lambda: _launch(bench, in_graph=True),
    }
    for name, measure in attempts.items():
        facts[name] = found.attempt(name, measure)
    rows = [
        [name.replace("_", " "), f"{value:.2f}" if isinstance(value, float) else str(value)]
        for name, value in facts.items()
    ]
    bench.show("device", ("what", "found"), rows)


def _copied(bench: Bench) -> float:
    """Return the bytes per second, read and written, of a large copy."""
    synchronize = partial(torch.cuda.synchronize, bench.device)
    num_bytes = FEW_BYTES if bench.is_simulated else COPY_BYTES
    return copy_bandwidth(bench.device, synchronize, num_bytes)


def _nvidia_smi() -> str:
    """Return the devices as nvidia-smi names them; that it is missing is no problem in a container."""
    try:
        asked = subprocess.run(
            NVIDIA_SMI, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "not here"
    return " / ".join((asked.stdout or asked.stderr).split("\n")).strip(" /")


@torch.inference_mode()
def _launch(bench: Bench, in_graph: bool) -> float:
    """Return the microseconds of one kernel that does next to nothing, among many."""
    number = torch.zeros(1, device=bench.device)
    count = FEW_LAUNCHES if bench.is_simulated else NUM_LAUNCHES

    def launch() -> None:
        for _ in range(count):
            number.add_(1)

    number.add_(1)
    if not in_graph:
        return 1e3 * time_once(launch, bench.device).total / count
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return 1e3 * times_of(graph.replay, bench.device, num_timed=3).device / count


def passes(bench: Bench, found: Found) -> None:
    """Time passes of every kind of target."""
    eager, copied = bench.target(EAGER), _copied(bench)
    peak = peak_bandwidth(torch.cuda.get_device_name(bench.device))
    rows: list[dict[str, Any]] = []
    all_nodes = FEW_NODES if bench.is_simulated else NODES
    contexts = FEW_CONTEXTS if bench.is_simulated else CONTEXTS
    for kind in KINDS:
        target = found.attempt(f"{kind} target", partial(bench.target, kind))
        if target is None:
            continue
        if kind != EAGER and type(target) is TargetModel:
            found.problems.append(f"{kind}: the model cannot be captured; see standard error")
        cases = [(nodes, context) for context in contexts for nodes in all_nodes]
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
    bench.show(title, (*header, "of copy", "of peak"), body)


def peak_bandwidth(name: str) -> float | None:
    """Return the peak memory bandwidth of a device; None if it is not known."""
    return next((peak for part, peak in PEAKS if part in name), None)


@torch.inference_mode()
def _timed(bench: Bench, target: TargetModel, nodes: int, context: int) -> Times:
    """Time a pass; what the cached rows hold does not matter for it."""
    cache = target.new_cache(context + nodes)
    call = partial(target.forward, draft_of(target, nodes), cache)
    restore = partial(cache.set_length, context)
    num_timed, num_warm = (1, 0) if bench.is_simulated else (NUM_TIMED, NUM_WARM)
    return times_of(call, bench.device, num_timed, num_warm, restore)


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
