"""Verdicts, each PASS, FAIL or NOT MEASURED with its figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from scripts.gpu_check.bench import EAGER, FAILED, FUSED, GRAPHS, Bench, Found

PASS, FAIL, NOT_MEASURED = "PASS", "FAIL", "NOT MEASURED"
# Targets of fused passes: of the copy roofline; passes over 16 nodes and the paper's tree over one node; tokens a
# second over stock graphs, and over transformers' compiled `generate`.
LEAST_ROOFLINE, LEAST_OVER_STOCK, LEAST_OVER_GENERATE = 0.78, 1.7, 4.0
MOST_OVER_ONE = {16: 1.1, 81: 1.35}
DRAFTING = ("recycling-averaged", "recycling-auto", "hybrid")

Judged = tuple[bool, str] | None  # whether it holds, with the figure


class CheckVerdict(NamedTuple):
    question: str
    verdict: str
    figure: str


def verdicts(bench: Bench, parts: Mapping[str, Found]) -> list[CheckVerdict]:
    """Return a verdict on every question, from what the parts found, and print them."""
    figures = {name: part.figures for name, part in parts.items()}
    laws, answers = figures.get("laws", {}), figures.get("answers", {})
    # Times of a simulated device mean nothing.
    timed = {} if bench.is_simulated else figures
    passes = timed.get("passes", {})
    speeds = {
        (row["kind"], row["method"]): row["tokens_per_second"]
        for row in timed.get("answers", {}).get("rows", ())
    }
    steps = figures.get("steps", {}).get("rows", ())
    late = [row["late_shapes"] for row in steps if row["kind"] != EAGER]
    failed = [name for name, part in parts.items() if part.status == FAILED]
    judged: dict[str, Judged] = {
        "the device's laws: tokens, steps, waits as on the CPU": (
            (laws["passed"], laws["closing"]) if "closing" in laws else None
        ),
        "no bug among differing float16 answers": _num_bugs(answers),
        "no graph captured within an answer": (
            (sum(late) == 0, f"{sum(late)} captured late") if late else None
        ),
        "fused passes have the same bits for every node": (
            (passes["has_same_bits"], passes["why_not"]) if "has_same_bits" in passes else None
        ),
        "no answer of fused passes differs from plain decoding's": _none_differs(answers),
        f"one node >= {LEAST_ROOFLINE:.0%} of the copy roofline": _roofline(passes),
        **{
            f"{nodes} nodes / one node <= {most}": _over_one(passes, nodes, most)
            for nodes, most in MOST_OVER_ONE.items()
        },
        **{
            f"{method} >= {LEAST_OVER_STOCK}x of its own on stock graphs": _speedup(
                speeds, (FUSED, method), (GRAPHS, method), LEAST_OVER_STOCK
            )
            for method in DRAFTING
        },
        f"hybrid >= {LEAST_OVER_GENERATE}x of compiled generate": _speedup(
            speeds, (FUSED, "hybrid"), (FUSED, "generate-static"), LEAST_OVER_GENERATE
        ),
        "hybrid >= 1.0x of the plain batch, 2 to 16 texts": _batches(timed.get("batches", {})),
        "no part failed": (
            not failed,
            f"failed: {', '.join(failed)}" if failed else f"{len(parts)} parts",
        ),
    }
    found = [
        CheckVerdict(question, NOT_MEASURED, "")
        if one is None
        else CheckVerdict(question, PASS if one[0] else FAIL, one[1])
        for question, one in judged.items()
    ]
    bench.show("verdicts", ("question", "verdict", "figure"), found)
    return found


def _num_bugs(found: Mapping[str, Any]) -> Judged:
    if "differing" not in found or (found["differing"] and not found["judged"]):
        return None
    said = f"{found['differing']} differ; judged: {found['ties']} ties, {found['bugs']} bugs"
    return not found["bugs"], said


def _none_differs(answers: Mapping[str, Any]) -> Judged:
    count = answers.get("differing_fused")
    return None if count is None else (count == 0, f"{count} differ")


def _times(passes: Mapping[str, Any]) -> dict[tuple[int, int], Mapping[str, Any]]:
    """Return the fused passes by cached rows and nodes."""
    rows = (row for row in passes.get("rows", ()) if row["kind"] == FUSED)
    return {(row["context"], row["nodes"]): row for row in rows}


def _roofline(passes: Mapping[str, Any]) -> Judged:
    """Judge a pass of one node."""
    shares = [
        (row["share_of_copy"], context)
        for (context, nodes), row in _times(passes).items()
        if nodes == 1
    ]
    if not shares:
        return None
    share, context = max(shares)
    return share >= LEAST_ROOFLINE, f"{share:.0%} ({context} cached)"


def _over_one(passes: Mapping[str, Any], nodes: int, most: float) -> Judged:
    """Judge a pass over nodes beside one over a single one, after the fewest cached rows."""
    times = _times(passes)
    context = min((context for context, count in times if count == nodes), default=None)
    if context is None or (context, 1) not in times:
        return None
    ratio = times[context, nodes]["ms"] / times[context, 1]["ms"]
    return ratio <= most, f"{ratio:.2f} ({context} cached)"


def _speedup(
    speeds: Mapping[tuple[str, str], float],
    one: tuple[str, str],
    other: tuple[str, str],
    least: float,
) -> Judged:
    if one not in speeds or other not in speeds:
        return None
    ratio = speeds[one] / speeds[other]
    return ratio >= least, f"{ratio:.2f}x"


def _batches(found: Mapping[str, Any]) -> Judged:
    """Judge the hybrid in batches of two and more."""
    speeds = {
        (row["batch_size"], row["method"]): row["tokens_per_second"]
        for row in found.get("rows", ())
        if row["batch_size"] > 1
    }
    ratios = {
        size: speeds[size, "hybrid"] / speed
        for (size, method), speed in speeds.items()
        if method == "vanilla" and (size, "hybrid") in speeds
    }
    if not ratios:
        return None
    said = ", ".join(f"{size}: {ratio:.2f}x" for size, ratio in ratios.items())
    return min(ratios.values()) >= 1, said
