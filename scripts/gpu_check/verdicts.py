"""Verdicts, each PASS, FAIL or NOT MEASURED with its figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.gpu_check.bench import FAILED, GRAPHS, Bench, Found

PASS, FAIL, NOT_MEASURED = "PASS", "FAIL", "NOT MEASURED"
# Targets: a tree's step over a plain one, of the copy roofline, recycling over plain decoding and `generate`.
MOST_TREE, LEAST_ROOFLINE, LEAST_SPEEDUP, LEAST_OVER_GENERATE = 1.2, 0.85, 2.0, 4.0

Judged = tuple[bool, str] | None  # whether it holds, with the figure


class CheckVerdict(NamedTuple):
    question: str
    verdict: str
    figure: str


def verdicts(bench: Bench, parts: Mapping[str, Found]) -> list[CheckVerdict]:
    """Return a verdict on every question, from what the parts found, and print them."""
    figures = {name: part.figures for name, part in parts.items()}
    laws, answers = figures.get("laws", {}), figures.get("answers", {})
    # As graphs; times of a simulated device mean nothing.
    rows: dict[str, list[dict[str, Any]]] = {
        name: [row for row in figures.get(name, {}).get("rows", ()) if row["kind"] == GRAPHS]
        for name in ("passes", "steps", "answers")
    }
    timed = {name: [] if bench.is_simulated else of_part for name, of_part in rows.items()}
    late = [row["late_shapes"] for row in rows["steps"]]
    tree = _over(timed["steps"], "step", "vanilla").get("recycling-averaged")
    failed = [name for name, part in parts.items() if part.status == FAILED]
    judged: dict[str, Judged] = {
        "the device's laws: tokens, steps, waits as on the CPU": (
            (laws["passed"], laws["closing"]) if "closing" in laws else None
        ),
        "no bug among differing float16 answers": _num_bugs(answers),
        "no graph captured within an answer": (
            (sum(late) == 0, f"{sum(late)} captured late") if late else None
        ),
        f"tree step / vanilla step <= {MOST_TREE}": (
            (tree <= MOST_TREE, f"{tree:.2f}") if tree else None
        ),
        f"vanilla >= {LEAST_ROOFLINE:.0%} of the copy roofline": _roofline(timed["passes"]),
        **{
            f"recycling >= {least}x of {words}": _speedup(timed["answers"], least, base)
            for words, base, least in (
                ("its own vanilla", "vanilla", LEAST_SPEEDUP),
                ("generate", "generate", LEAST_OVER_GENERATE),
            )
        },
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


def _over(rows: Sequence[Mapping[str, Any]], figure: str, base: str) -> dict[str, float]:
    """Return a figure of recycling, with the tree template or the automatic one, over another method's."""
    values = {row["method"]: row[figure] for row in rows}
    named = [name for name in values if name.startswith("recycling") and base in values]
    return {name: values[name] / values[base] for name in named}


def _roofline(rows: Sequence[Mapping[str, Any]]) -> Judged:
    """Judge a pass of one node."""
    shares = [(row["share_of_copy"], row["context"]) for row in rows if row["nodes"] == 1]
    if not shares:
        return None
    share, context = max(shares)
    return share >= LEAST_ROOFLINE, f"{share:.0%} ({context} cached)"


def _speedup(rows: Sequence[Mapping[str, Any]], least: float, base: str) -> Judged:
    ratios = _over(rows, "tokens_per_second", base)
    if not ratios:
        return None
    name = max(ratios, key=ratios.__getitem__)
    return ratios[name] >= least, f"{ratios[name]:.2f}x ({name})"
