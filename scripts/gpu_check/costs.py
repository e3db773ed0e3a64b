"""What the device costs: its facts, its laws (`pytest -m gpu`), passes by nodes and cached rows, whole steps."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from model.backends.target import TargetModel
from model.budget.measure import draft_of, time_pass
from model.commands.model_options import nvidia_driver
from model.engine.loop import decode
from model.engine.step import PARTS
from model.kernels.linear import quantised_weights, stored
from model.kernels.norms import has_fused_rms_norm
from model.kernels.registered_attention import sdpa_backends
from model.machine.timing import seconds_of
from scripts.gpu_check.bench import EAGER, Bench, Found, drafter_of

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/simulated_device"
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
MOST_KERNELS = 12  # of a pass, the longest
# The paper's tree of 80 nodes, and its root.
TREE = 81


def device_facts(bench: Bench, found: Found) -> None:
    """Name device and software, and measure how fast it copies and launches."""
    attempts: dict[str, Callable[[], object]] = {
        "driver": nvidia_driver,
        "name": lambda: torch.cuda.get_device_name(bench.device),
        "capability": lambda: "sm_{}{}".format(*torch.cuda.get_device_capability(bench.device)),
        "processors": lambda: torch.cuda.get_device_properties(bench.device).multi_processor_count,
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
        found.figures[name] = found.attempt(name, measure)
    rows = [(name.replace("_", " "), value) for name, value in found.figures.items()]
    bench.show("device", ("what", "found"), rows)


def _median(bench: Bench, call: Callable[[], object], num_timed: int, num_warm: int = 3) -> float:
    """Return the seconds of a call until the device has done its work; the first calls prepare libraries."""
    synchronize = partial(torch.cuda.synchronize, bench.device)
    seconds = [seconds_of(call, synchronize) for _ in range(num_warm + num_timed)]
    return statistics.median(seconds[num_warm:])


@torch.inference_mode()
def _copied(bench: Bench) -> float:
    """Return the bytes per second, read and written, of a large copy."""
    num_bytes = bench.sized(2**28, 2**16)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=bench.device)
    return 2 * num_bytes / _median(bench, partial(torch.empty_like(source).copy_, source), 7)


@torch.inference_mode()
def _launch(bench: Bench, in_graph: bool) -> float:
    """Return the microseconds of one kernel that does next to nothing, among many."""
    number = torch.zeros(1, device=bench.device)
    count = bench.sized(10_000, 20)

    def launch() -> None:
        for _ in range(count):
            number.add_(1)

    number.add_(1)
    if not in_graph:
        return 1e6 * _median(bench, launch, 1, num_warm=0) / count
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return 1e6 * _median(bench, graph.replay, 3) / count


def laws(bench: Bench, found: Found) -> None:
    """Run the tests of the device's laws in a process of their own; each that fails is a problem.

    Raises:
        RuntimeError: if they did not run.
    """
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", TESTS]
    environment = dict(os.environ)
    if bench.is_simulated:  # where the usual tests hold all laws
        words += ["-k", "test_rows_move"]
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=None if bench.is_simulated else bench.seconds_left,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    counts = {name: int(count) for count, name in COUNTS.findall(lines[-1] if lines else "")}
    if done.returncode not in (0, 1) or not counts.get("passed"):
        said = (done.stderr.strip() or "\n".join(lines)).splitlines() or ["nothing"]
        raise RuntimeError(
            f"{TESTS}: pytest ended with code {done.returncode} and said: {said[-1]}; it needs a checkout, and "
            "pip install -r requirements-test.txt"
        )
    found.problems += [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    found.figures |= {"counts": counts, "closing": lines[-1], "passed": done.returncode == 0}
    print(f"\npytest -m gpu: {lines[-1]}", flush=True)


@torch.inference_mode()
def passes(bench: Bench, found: Found) -> None:
    """Time passes of every kind of target."""
    copied = _copied(bench)
    rows: list[dict[str, Any]] = []
    all_nodes = bench.sized((1, 8, 16, 32, 64, TREE, 88, 128), (1, TREE))
    contexts = bench.sized((512, 1536), (40,))
    num_timed, num_warm = bench.sized((20, 3), (1, 0))

    def timed(target: TargetModel, kind: str, context: int, nodes: int) -> dict[str, Any]:
        cache, tree = target.new_cache(context + nodes), draft_of(target, nodes)
        times = [time_pass(target, cache, tree, context) for _ in range(num_warm + num_timed)]
        median = statistics.median(times[num_warm:])
        bandwidth = _bytes_of_token(target, context) / (1e-3 * median)
        share = {"gb_per_second": 1e-9 * bandwidth, "share_of_copy": bandwidth / copied}
        return {"kind": kind, "nodes": nodes, "context": context, "ms": median, **share}

    for kind in bench.kinds:
        target = found.attempt(f"{kind} target", partial(bench.target, kind))
        if target is None:
            continue
        for context, nodes in bench.in_time(product(contexts, all_nodes), found):
            what = f"{kind}, {nodes} nodes after {context}"
            row = found.attempt(what, partial(timed, target, kind, context, nodes))
            rows += [row] if row else []
    fused = getattr(bench.target(bench.kinds[-1]), "fused", None)
    promise = {"has_same_bits": fused.has_same_bits, "why_not": fused.why_not} if fused else {}
    found.figures |= {"rows": rows, "copy_gb_per_second": 1e-9 * copied, **promise}
    header = ("target", "nodes", "cached", "ms", "GB/s", "of copy")
    bench.show("passes", header, [list(row.values()) for row in rows])


@torch.inference_mode()
def kernels(bench: Bench, found: Found) -> None:
    """Sum up the time of a pass's kernels by their names, of stock graphs and of fused passes."""
    rows: list[dict[str, Any]] = []
    num_passes = bench.sized(10, 1)
    for kind, nodes in product(bench.kinds, bench.sized((1, 16, TREE), (1,))):
        target = bench.target(kind)
        if kind == EAGER:
            continue
        cache, tree = target.new_cache(512 + nodes), draft_of(target, nodes)
        for _ in range(2):  # the second is captured
            time_pass(target, cache, tree, 512)
        with torch.profiler.profile() as seen:
            for _ in range(num_passes):
                time_pass(target, cache, tree, 512)
        of_device = [event for event in seen.key_averages() if event.device_time_total]
        for event in sorted(of_device, key=lambda one: -one.device_time_total)[:MOST_KERNELS]:
            each = {
                "launches": event.count / num_passes,
                "ms": event.device_time_total / num_passes / 1e3,
            }
            rows.append({"kind": kind, "nodes": nodes, "kernel": event.key[:60], **each})
    found.figures["rows"] = rows
    header = ("target", "nodes", "kernel", "launches", "ms")
    bench.show("kernels of a pass", header, [list(row.values()) for row in rows])


def _bytes_of_token(target: TargetModel, context: int) -> int:
    """Return the bytes of weights and cache that one token of plain decoding reads at a context length."""
    embedding = stored(target.model.get_input_embeddings())
    head = target.model.get_output_embeddings()
    tensors = (*target.model.parameters(), *quantised_weights(target.model))
    weights = sum(tensor.nbytes for tensor in tensors)
    if head is None or stored(head) is not embedding:
        # An untied embedding gives one row a token; a tied one is read whole as the output head.
        weights -= embedding.nbytes
    cache = target.new_cache(context)
    return weights + cache.num_bytes * context // cache.capacity


def whole_steps(bench: Bench, found: Found) -> None:
    """Time the parts of steps, and hold that no answer captures."""
    rows: list[dict[str, Any]] = []
    methods = bench.sized(
        ("vanilla", "recycling-averaged", "recycling-auto", "hybrid"),
        ("vanilla", "recycling-averaged"),
    )
    for kind, name in bench.in_time(product(bench.kinds, methods), found):
        what = f"{name}, {kind}"
        row = found.attempt(what, partial(_prepared_steps, bench, kind, name))
        if row is None:
            continue
        rows.append({"kind": kind, "method": name, **row})
        if row["late_shapes"]:
            found.problems.append(f"{what}: {row['late_shapes']} calls came first within an answer")
    found.figures["rows"] = rows
    header = ("target", "method", *PARTS, "step", "tokens", "graphs", "late", "seconds", "MiB")
    title = "milliseconds of a step by part, its tokens, and what was prepared for a method beyond those above"
    bench.show(title, header, [list(row.values()) for row in rows])


def _prepared_steps(bench: Bench, kind: str, name: str) -> dict[str, Any]:
    """Decode a text, prepare for a longer one, and measure its steps: the mean of each part, in milliseconds."""

    def allocated() -> float:
        torch.cuda.synchronize(bench.device)
        return torch.cuda.memory_allocated(bench.device) / 2**20

    target = bench.target(kind)
    before, allocated_before = target.preparation, allocated()
    drafter = drafter_of(name, target)
    num_tokens = bench.sized(128, 4)
    short, long = sorted(bench.prompts(2), key=len)
    list(decode(target, drafter, short, max_new_tokens=num_tokens, eos_ids=()))
    # The second text is made longer than any bucket that the first has seen.
    drafter.prepare(target, len(long) + 2 * num_tokens)
    steps = list(decode(target, drafter, long, max_new_tokens=2 * num_tokens, eos_ids=()))[1:]
    means = {
        part: sum(getattr(step, f"{part}_ns") for step in steps) / 1e6 / len(steps)
        for part in PARTS
    }
    after = target.preparation
    return {
        **means,
        "step": sum(means.values()),
        "tokens": sum(len(step.tokens) for step in steps) / len(steps),
        "graphs": after.num_graphs - before.num_graphs,
        "late_shapes": target.num_late,
        "seconds": after.seconds - before.seconds,
        "allocated_mb": allocated() - allocated_before,
    }
