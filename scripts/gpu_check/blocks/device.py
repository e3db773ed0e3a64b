"""Block 0: the device, its software, its bandwidth, and what a launch costs."""

from __future__ import annotations

import subprocess
from functools import partial
from typing import Any

import torch

from model.commands.device import SMI_SECONDS
from model.kernels.norms import has_fused_rms_norm
from model.kernels.sdpa import sdpa_backends
from scripts.benchmark.device_costs import copy_bandwidth
from scripts.gpu_check.bench import Bench
from scripts.gpu_check.clock import time_once, times_of
from scripts.gpu_check.findings import Findings, Table

NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,pstate,clocks.sm,clocks.mem,power.limit,temperature.gpu,memory.used",
    "--format=csv,noheader",
)


def device_facts(bench: Bench) -> Findings:
    """Name device and software, and measure how fast it copies and launches."""
    found = Findings()
    found.figures |= bench.device_facts
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
        "copy_gb_per_second": lambda: 1e-9 * _copy_bandwidth(bench),
        "launch_microseconds_eager": lambda: _launch(bench, in_graph=False),
        "launch_microseconds_in_graph": lambda: _launch(bench, in_graph=True),
    }
    for name, measure in attempts.items():
        facts[name] = found.attempt(name, measure)
    rows = [[name.replace("_", " "), _shown(value)] for name, value in facts.items()]
    found.tables.append(Table("device", ("what", "found"), rows))
    return found


def _nvidia_smi() -> str:
    """Return the devices as nvidia-smi names them; that it is missing is no problem in a container."""
    try:
        asked = subprocess.run(
            NVIDIA_SMI, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "not here"
    return " / ".join((asked.stdout or asked.stderr).split("\n")).strip(" /")


def _copy_bandwidth(bench: Bench) -> float:
    synchronize = partial(torch.cuda.synchronize, bench.device)
    return copy_bandwidth(bench.device, synchronize, bench.sizes.copy_bytes)


@torch.inference_mode()
def _launch(bench: Bench, in_graph: bool) -> float:
    """Return the microseconds of one kernel that does nothing to speak of, among many."""
    number = torch.zeros(1, device=bench.device)
    count = bench.sizes.num_launches

    def launch() -> None:
        for _ in range(count):
            number.add_(1)

    if not in_graph:
        number.add_(1)
        return 1e3 * time_once(launch, bench.device).total / count
    number.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return 1e3 * times_of(graph.replay, bench.device, num_timed=3).device / count


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
