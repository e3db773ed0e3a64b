"""Verdicts, each PASS, FAIL or NOT MEASURED with its figure, and the commands of the README's tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from scripts.gpu_check.bench import EAGER, FAILED, GRAPHS, Bench, Found

PASS, FAIL, NOT_MEASURED = "PASS", "FAIL", "NOT MEASURED"
# Targets: a tree's step over a plain one, of the copy roofline, recycling over plain decoding and `generate`.
MOST_TREE, LEAST_ROOFLINE, LEAST_SPEEDUP, LEAST_OVER_GENERATE = 1.2, 0.85, 2.0, 4.0
COMMANDS = (
    "python -m scripts.download_data spec_bench mbpp",
    'MODEL_PATH=lmsys/vicuna-7b-v1.3 ALLOW_PICKLE=1 BENCH="spec_bench mbpp" bash eval.sh',
    'MODEL_PATH=lmsys/vicuna-7b-v1.3 ALLOW_PICKLE=1 BENCH="spec_bench mbpp" GRAPHS=off bash eval.sh',
    "python -m scripts.results pack ANSWERS docs/results/NAME.tar.xz",
    "python -m scripts.results tables",
)

Judged = tuple[bool, str] | None  # whether it holds, with the figure


class Verdict(NamedTuple):
    question: str
    verdict: str
    figure: str


def verdicts(bench: Bench, parts: Mapping[str, Found]) -> list[Verdict]:
    """Return a verdict on every question, from what the parts found; print them, and commands for more."""
    figures = {name: found.figures for name, found in parts.items()}
    # Times of a simulated device mean nothing.
    timed: Mapping[str, dict[str, Any]] = {} if bench.is_simulated else figures
    said, asked = figures.get("laws", {}), timed.get("answers", {})
    steps, passes = timed.get("steps", {}), timed.get("passes", {})
    judged: dict[str, Judged] = {
        "the device's laws: tokens, steps, waits as on the CPU": (
            (said["passed"], said["closing"]) if "closing" in said else None
        ),
        "no bug among differing float16 answers": _num_bugs(figures.get("answers", {})),
        "no graph captured within an answer": _num_late(figures.get("steps", {})),
        f"tree step / vanilla step <= {MOST_TREE}": _tree_ratio(steps),
        f"vanilla >= {LEAST_ROOFLINE:.0%} of the copy roofline": _roofline(passes),
        f"recycling >= {LEAST_SPEEDUP}x of its own vanilla": _ratio(
            asked, LEAST_SPEEDUP, "vanilla"
        ),
        f"recycling >= {LEAST_OVER_GENERATE}x of generate": _ratio(
            asked, LEAST_OVER_GENERATE, "generate"
        ),
        "no part failed": _failures(parts),
    }
    found = [
        Verdict(question, NOT_MEASURED, "")
        if one is None
        else Verdict(question, PASS if one[0] else FAIL, one[1])
        for question, one in judged.items()
    ]
    bench.show("verdicts", ("question", "verdict", "figure"), found)
    print("\nfor the README's tables:", *COMMANDS, sep="\n    ")
    return found


def _num_bugs(found: Mapping[str, Any]) -> Judged:
    if "differing" not in found or (found["differing"] and not found["judged"]):
        return None
    said = f"{found['differing']} differ; judged: {found['ties']} ties, {found['bugs']} bugs"
    return not found["bugs"], said


def _num_late(found: Mapping[str, Any]) -> Judged:
    rows = [row for row in found.get("rows", ()) if row["kind"] != EAGER]
    late = sum(row["late_shapes"] for row in rows)
    return (late == 0, f"{late} captured late") if rows else None


def _tree_ratio(found: Mapping[str, Any]) -> Judged:
    """Judge whole steps as graphs: recycling's tree against plain decoding."""
    steps = {row["method"]: row["step"] for row in found.get("rows", ()) if row["kind"] == GRAPHS}
    if not {"vanilla", "recycling"} <= set(steps):
        return None
    ratio = steps["recycling"] / steps["vanilla"]
    return ratio <= MOST_TREE, f"{ratio:.2f}"


def _roofline(found: Mapping[str, Any]) -> Judged:
    """Judge a pass of one node as a graph."""
    shares = [
        (row["share_of_copy"], row["kind"], row["context"])
        for row in found.get("rows", ())
        if row["nodes"] == 1 and row["kind"] != EAGER
    ]
    if not shares:
        return None
    share, kind, context = max(shares)
    return share >= LEAST_ROOFLINE, f"{share:.0%} ({kind}, {context} cached)"


def _ratio(found: Mapping[str, Any], least: float, base: str) -> Judged:
    """Judge the best of recycling's speeds, tree template or automatic, over another's."""
    speeds = {
        (row["kind"], row["method"]): row["tokens_per_second"]
        for row in (*found.get("rows", ()), *found.get("more", ()))
    }
    ratios = []
    for (kind, method), speed in speeds.items():
        # Transformers' own ways to decode may have answered eager alone.
        other = speeds.get((kind, base), speeds.get((EAGER, base)))
        if method.startswith("recycling") and kind == GRAPHS and other:
            ratios.append((speed / other, f"{method}, {kind}"))
    if not ratios:
        return None
    ratio, name = max(ratios)
    return ratio >= least, f"{ratio:.2f}x ({name})"


def _failures(parts: Mapping[str, Found]) -> Judged:
    failed = [name for name, found in parts.items() if found.status == FAILED]
    return not failed, f"failed: {', '.join(failed)}" if failed else f"{len(parts)} parts"
