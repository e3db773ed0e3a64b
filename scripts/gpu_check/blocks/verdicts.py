"""Block 8: verdicts, each PASS, FAIL or NOT MEASURED with its figure, and the commands of the README's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from scripts.gpu_check.bench import COMPILED, EAGER, GRAPHS, Bench
from scripts.gpu_check.findings import FAILED, Findings, Table

PASS, FAIL, NOT_MEASURED = "PASS", "FAIL", "NOT MEASURED"
# Targets: a tree's step over a plain one, of the copy roofline, recycling over plain decoding and `generate`.
MOST_TREE, LEAST_ROOFLINE, LEAST_SPEEDUP, LEAST_OVER_GENERATE = 1.2, 0.85, 2.0, 4.0
DEVICE, METHODS, ATTENTION, PASSES, STEPS, ANSWERS, CAPTURES = range(7)
COMMANDS = (
    "python -m scripts.download_data spec_bench mbpp",
    'MODEL_PATH=lmsys/vicuna-7b-v1.3 ALLOW_PICKLE=1 BENCH="spec_bench mbpp" bash eval.sh',
    'MODEL_PATH=lmsys/vicuna-7b-v1.3 ALLOW_PICKLE=1 BENCH="spec_bench mbpp" GRAPHS=off bash eval.sh',
    "python -m scripts.benchmark --shape 7b --dtype float16 --device cuda --out gpu.json",
    "python -m evaluation.leaderboard ANSWERS --no-published --json docs/benchmarks/NAME.json",
    "python -m scripts.benchmark.results",
)

Figures = Mapping[int, Mapping[str, Any]]


class Verdict(NamedTuple):
    """The answer to a question."""

    question: str
    verdict: str
    figure: str


def verdicts(bench: Bench) -> Findings:
    """Return a verdict on every question, from what the earlier blocks found."""
    figures = {number: result.findings.figures for number, result in bench.results.items()}
    # Times of a simulated device mean nothing.
    timed: Figures = {} if bench.is_simulated else figures
    found = [
        _judged("tokens and steps equal to the CPU's", _is_equal(figures)),
        _judged("no bug among differing float16 answers", _num_bugs(figures)),
        _judged("no graph captured within an answer", _num_late(figures)),
        _judged("no attention in use builds plans", _plans(timed)),
        _judged(f"tree step / vanilla step <= {MOST_TREE}", _tree_ratio(timed)),
        _judged(f"vanilla >= {LEAST_ROOFLINE:.0%} of the copy roofline", _roofline(timed)),
        _judged(f"recycling >= {LEAST_SPEEDUP}x of its own vanilla", _speedup(timed)),
        _judged(f"recycling >= {LEAST_OVER_GENERATE}x of generate", _over_generate(timed)),
        _judged("no block failed", _failures(bench)),
    ]
    rows = [[one.question, one.verdict, one.figure] for one in found]
    return Findings(
        figures={"verdicts": [one._asdict() for one in found], "commands": list(COMMANDS)},
        tables=[Table("verdicts", ("question", "verdict", "figure"), rows)],
        notes=[f"for the README's tables: {command}" for command in COMMANDS],
    )


def _judged(question: str, found: tuple[bool, str] | None) -> Verdict:
    if found is None:
        return Verdict(question, NOT_MEASURED, "")
    return Verdict(question, PASS if found[0] else FAIL, found[1])


def _is_equal(figures: Figures) -> tuple[bool, str] | None:
    runs = figures.get(METHODS, {}).get("runs")
    if not runs:
        return None
    num_equal = sum(row["tokens_equal"] and row["steps_equal"] for row in runs)
    return num_equal == len(runs), f"{num_equal} of {len(runs)} runs"


def _num_bugs(figures: Figures) -> tuple[bool, str] | None:
    found = figures.get(ANSWERS, {})
    if "differing" not in found or (found["differing"] and not found["judged"]):
        return None
    return (
        not found["bugs"],
        f"{found['differing']} differ; judged: {found['ties']} ties, {found['bugs']} bugs",
    )


def _num_late(figures: Figures) -> tuple[bool, str] | None:
    late = figures.get(CAPTURES, {}).get("late_shapes")
    return None if late is None else (late == 0, f"{late} captured late")


def _plans(figures: Figures) -> tuple[bool, str] | None:
    found = figures.get(ATTENTION, {})
    if "with_plans" not in found:
        return None
    # cuDNN's is turned off in all commands.
    in_use = [name for name in found["with_plans"] if name != "cudnn"]
    return not in_use, f"with plans: {', '.join(found['with_plans']) or 'none'}"


def _tree_ratio(figures: Figures) -> tuple[bool, str] | None:
    """Judge whole steps as graphs: recycling's tree against plain decoding."""
    steps = {
        row["method"]: row["step"]
        for row in figures.get(STEPS, {}).get("parts", ())
        if row["kind"] == GRAPHS
    }
    if not {"vanilla", "recycling"} <= set(steps):
        return None
    ratio = steps["recycling"] / steps["vanilla"]
    return ratio <= MOST_TREE, f"{ratio:.2f}"


def _roofline(figures: Figures) -> tuple[bool, str] | None:
    """Judge a pass of one node by the fastest kind of target."""
    shares = [
        (row["share_of_copy"], row["kind"], row["context"])
        for row in figures.get(PASSES, {}).get("rows", ())
        if row["nodes"] == 1 and row["kind"] != EAGER
    ]
    if not shares:
        return None
    share, kind, context = max(shares)
    return share >= LEAST_ROOFLINE, f"{share:.0%} ({kind}, {context} cached)"


def _speedup(figures: Figures) -> tuple[bool, str] | None:
    return _ratio(figures, LEAST_SPEEDUP, "vanilla", lambda kind: kind)


def _over_generate(figures: Figures) -> tuple[bool, str] | None:
    return _ratio(figures, LEAST_OVER_GENERATE, "generate", lambda kind: EAGER)


def _ratio(
    figures: Figures, least: float, base: str, kind_of_base: Callable[[str], str]
) -> tuple[bool, str] | None:
    """Judge the best of recycling's speeds, tree template or automatic, over another's."""
    speeds = {
        (row["kind"], row["method"]): row["tokens_per_second"]
        for row in figures.get(ANSWERS, {}).get("rows", ())
    }
    ratios = [
        (speed / speeds[kind_of_base(kind), base], f"{method}, {kind}")
        for (kind, method), speed in speeds.items()
        if method.startswith("recycling")
        and kind in (GRAPHS, COMPILED)
        and (kind_of_base(kind), base) in speeds
    ]
    if not ratios:
        return None
    ratio, name = max(ratios)
    return ratio >= least, f"{ratio:.2f}x ({name})"


def _failures(bench: Bench) -> tuple[bool, str]:
    failed = [str(one.number) for one in bench.results.values() if one.status == FAILED]
    return not failed, f"failed: {', '.join(failed)}" if failed else f"{len(bench.results)} blocks"
