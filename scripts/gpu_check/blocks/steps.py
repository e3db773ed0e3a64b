"""Block 4: a whole step against its parts, and its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from model.engine.drafter import Drafter
from model.engine.loop import decode
from model.engine.step import PARTS, StepRecord
from model.engine.target import TargetModel
from scripts.gpu_check.bench import EAGER, GRAPHS, Bench
from scripts.gpu_check.findings import Findings, Table, cell
from tests.simulated_device.demo import MAIN_SETTINGS, Setting

# Kernels that are profiled: the tree of the paper, and plain decoding beside it.
PROFILED = MAIN_SETTINGS[:2]
# Shorter kernels take about as long as their launch within a graph.
SHORT_MICROSECONDS = 3.0
NUM_TOP = 15


def whole_steps(bench: Bench) -> Findings:
    """Time the parts of steps, and list the kernels of some."""
    found = Findings()
    parts: list[dict[str, Any]] = []
    cases = [(kind, setting) for kind in (EAGER, GRAPHS) for setting in MAIN_SETTINGS]
    for kind, setting in bench.in_time(cases, found):
        name = f"{setting.name}, {kind}"
        row = found.attempt(name, partial(_parts, bench, kind, setting))
        if row is not None:
            parts.append({"kind": kind, "method": setting.name, **row})
    found.figures["parts"] = parts
    found.tables.append(_parts_table(parts))
    cases = [(kind, setting) for kind in (GRAPHS, EAGER) for setting in PROFILED]
    found.figures["kernels"] = {}
    for kind, setting in bench.in_time(cases, found):
        name = f"{setting.name}, {kind}"
        kernels = found.attempt(f"kernels of {name}", partial(_kernels, bench, kind, setting))
        if kernels is not None:
            found.figures["kernels"][name] = kernels
            found.tables.append(_kernel_table(name, kernels))
    return found


def _parts(bench: Bench, kind: str, setting: Setting) -> dict[str, float]:
    """Return the mean milliseconds of each part of a step, and of the whole."""
    target = bench.target(kind)
    steps = _steps(bench, target, setting.drafter(target), bench.sizes.num_tokens)
    spent = {part: [getattr(step, f"{part}_ns") / 1e6 for step in steps] for part in PARTS}
    means = {part: sum(times) / len(times) for part, times in spent.items()}
    lengths = [len(step.tokens) for step in steps]
    return {**means, "step": sum(means.values()), "tokens": sum(lengths) / len(lengths)}


def _steps(
    bench: Bench, target: TargetModel, drafter: Drafter, num_tokens: int
) -> list[StepRecord]:
    """Return the steps of a warm text, but for the first ones, which may prepare something."""
    prompt = bench.prompts(1)[0]
    options: dict[str, Any] = {"max_new_tokens": num_tokens, "eos_ids": ()}
    list(decode(target, drafter, prompt, **options))
    longest = len(prompt) + num_tokens
    drafter.prepare(target, longest)
    return list(decode(target, drafter, prompt, **options))[1:]


def _kernels(bench: Bench, kind: str, setting: Setting) -> dict[str, Any]:
    """Return the kernels of some steps under the profiler, in microseconds and counts a step."""
    target = bench.target(kind)
    drafter = setting.drafter(target)
    _steps(bench, target, drafter, bench.sizes.num_tokens)
    # A device that is simulated launches nothing that a profiler sees: its operations stand in.
    activities = [ProfilerActivity.CPU]
    if not bench.is_simulated:
        activities.append(ProfilerActivity.CUDA)
    steps = decode(target, drafter, bench.prompts(1)[0], max_new_tokens=bench.sizes.num_tokens)
    next(steps)
    num_steps = 0
    with profile(activities=activities) as profiler:
        for _ in range(bench.sizes.num_profiled):
            num_steps += next(steps, None) is not None
        target.synchronize()
    wanted = DeviceType.CPU if bench.is_simulated else DeviceType.CUDA
    kernels = [
        (event.name, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == wanted
    ]
    return summary(kernels, num_steps)


def summary(kernels: Sequence[tuple[str, float]], num_steps: int) -> dict[str, Any]:
    """Return counts and times a step of kernels, each with its name and microseconds.

    Raises:
        RuntimeError: if there are none.
    """
    if not kernels or not num_steps:
        raise RuntimeError("the profiler saw no kernels; does the machine allow CUPTI?")
    times, counts = Counter[str](), Counter[str]()
    for name, microseconds in kernels:
        times[name] += microseconds  # type: ignore[assignment]  # as a float
        counts[name] += 1
    short = sum(microseconds for _, microseconds in kernels if microseconds < SHORT_MICROSECONDS)
    return {
        "kernels_a_step": counts.total() / num_steps,
        "microseconds_a_step": times.total() / num_steps,
        "short_microseconds_a_step": short / num_steps,
        "top": [
            {"name": name, "microseconds": time / num_steps, "count": counts[name] / num_steps}
            for name, time in times.most_common(NUM_TOP)
        ],
    }


def _parts_table(rows: list[dict[str, Any]]) -> Table:
    keys = (*PARTS, "step", "tokens")
    body = [[row["kind"], row["method"], *(cell(row[key], 3) for key in keys)] for row in rows]
    return Table(
        "milliseconds of a step by part, and its tokens", ("target", "method", *keys), body
    )


def _kernel_table(name: str, kernels: dict[str, Any]) -> Table:
    title = (
        f"kernels of a step, {name}: {kernels['kernels_a_step']:.0f} kernels, "
        f"{kernels['microseconds_a_step']:.0f} us, of which {kernels['short_microseconds_a_step']:.0f} us in "
        f"kernels under {SHORT_MICROSECONDS:.0f} us"
    )
    body = [
        [one["name"][:80], cell(one["microseconds"], 1), cell(one["count"], 1)]
        for one in kernels["top"]
    ]
    return Table(title, ("kernel", "us a step", "calls a step"), body)
