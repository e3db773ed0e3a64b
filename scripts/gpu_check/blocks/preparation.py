"""Blocks 6 and 7: what captures and compilations take, and that a second text needs none."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from model.compiled.graphs import GraphedTarget
from model.engine.loop import generate
from model.engine.target import TargetModel
from scripts.gpu_check.bench import COMPILED, GRAPHS, Bench
from scripts.gpu_check.findings import Findings, Table, cell
from tests.simulated_device.demo import MAIN_SETTINGS, Setting


def captures(bench: Bench) -> Findings:
    """Measure the graphs of each method, and hold that no answer captures."""
    found = Findings()
    rows: list[dict[str, Any]] = []
    for setting in bench.in_time(MAIN_SETTINGS, found):
        row = found.attempt(setting.name, partial(_captured, bench, setting, found))
        if row is not None:
            rows.append({"method": setting.name, **row})
    found.figures["rows"] = rows
    late = [row["late_shapes"] for row in rows if row["late_shapes"] is not None]
    found.figures["late_shapes"] = sum(late) if late else None
    header = ("method", "graphs", "seconds", "ms a graph", "allocated MB", "reserved MB", "late")
    body = [
        [
            row["method"],
            str(row["graphs"]),
            cell(row["seconds"]),
            cell(1e3 * row["seconds"] / row["graphs"] if row["graphs"] else None, 1),
            *(cell(row[key] / 2**20, 1) for key in ("allocated_bytes", "reserved_bytes")),
            str(row["late_shapes"]),
        ]
        for row in rows
    ]
    found.tables.append(
        Table("graphs of a method, and those captured within an answer", header, body)
    )
    return found


def _captured(bench: Bench, setting: Setting, found: Findings) -> dict[str, Any]:
    """Capture for a method on a target of its own; return counts, seconds and memory."""
    before = _memory(bench)
    start = time.perf_counter()
    target = bench.new_target(GRAPHS)
    if bench.is_simulated:
        target.measured |= bench.target(GRAPHS).measured
    if not isinstance(target, GraphedTarget):
        raise RuntimeError("the model cannot be captured; see standard error")
    _two_texts(bench, target, setting)
    if target.shapes.num_late:
        found.problems.append(
            f"{setting.name}: {target.shapes.num_late} calls were captured within an answer"
        )
    after = _memory(bench)
    prepared = target.shapes.preparation
    return {
        "graphs": prepared.num_graphs,
        "seconds": prepared.seconds,
        "seconds_with_texts": time.perf_counter() - start,
        "allocated_bytes": after[0] - before[0],
        "reserved_bytes": after[1] - before[1],
        "late_shapes": target.shapes.num_late,
    }


def _two_texts(bench: Bench, target: TargetModel, setting: Setting) -> None:
    """Decode a text, warm up, and decode another one of another length."""
    drafter = setting.drafter(target)
    count = bench.sizes.num_tokens
    short, long = sorted(bench.prompts(2), key=len)
    generate(target, drafter, short, max_new_tokens=count)
    # The second text is made longer than any bucket that the first has seen.
    longest = len(long) + 2 * count
    drafter.prepare(target, longest)
    generate(target, drafter, long, max_new_tokens=2 * count)


def _memory(bench: Bench) -> tuple[int, int]:
    torch.cuda.synchronize(bench.device)
    return torch.cuda.memory_allocated(bench.device), torch.cuda.memory_reserved(bench.device)


def compilations(bench: Bench) -> Findings:
    """Measure compilation, and hold that nothing is compiled after the warm-up."""
    found = Findings()
    target = bench.target(COMPILED)
    assert isinstance(target, GraphedTarget)
    rows = []
    for setting in bench.in_time(MAIN_SETTINGS, found):
        row = found.attempt(setting.name, partial(_compiled, bench, target, setting))
        if row is not None:
            rows.append({"method": setting.name, **row})
    found.figures["rows"] = rows
    header = ("method", "functions", "graphs", "seconds", "seconds a function", "late")
    body = [
        [
            row["method"],
            str(row["functions"]),
            str(row["graphs"]),
            cell(row["seconds"], 1),
            cell(row["seconds"] / max(1, row["functions"]), 1),
            str(row["late_shapes"]),
        ]
        for row in rows
    ]
    found.tables.append(Table("compiled functions, added up over methods", header, body))
    for row in rows:
        if row["late_shapes"]:
            found.problems.append(f"{row['method']}: {row['late_shapes']} shapes came late")
    return found


def _compiled(bench: Bench, target: GraphedTarget, setting: Setting) -> dict[str, Any]:
    """Compile for a method and return the counts; a function that is compiled again later raises."""
    _two_texts(bench, target, setting)
    with torch.compiler.set_stance("fail_on_recompile"):
        generate(
            target,
            setting.drafter(target),
            bench.prompts(1)[0],
            max_new_tokens=bench.sizes.num_tokens,
        )
    prepared = target.shapes.preparation
    return {
        "functions": prepared.num_functions,
        "graphs": prepared.num_graphs,
        "seconds": prepared.seconds,
        "late_shapes": target.shapes.num_late,
    }
