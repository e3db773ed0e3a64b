"""The report of the check: tables for people, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evaluation.answers.provenance import git_commit, versions
from evaluation.reporting.tables import markdown_table
from scripts.gpu_check.bench import Bench
from scripts.gpu_check.findings import Result

NO_MEASUREMENT = "simulated device: times and speeds are not a measurement"
# The first column names things; figures follow.
NUM_TEXT_COLUMNS = 2


def report_of(bench: Bench, argv: Sequence[str]) -> dict[str, Any]:
    """Return the report of all blocks so far."""
    results = bench.results.values()
    by_number = {result.number: result.findings.figures for result in results}
    ending = next((figures for figures in by_number.values() if "verdicts" in figures), {})
    return {
        "argv": list(argv),
        "simulated": bench.is_simulated,
        "times_are_measurements": not bench.is_simulated,
        "model_path": bench.options.model_path,
        "shape": bench.shape,
        "git_commit": git_commit(),
        "versions": versions(),
        "verdicts": ending.get("verdicts", []),
        "commands": ending.get("commands", []),
        "blocks": [result.record for result in results],
    }


def print_result(result: Result, is_simulated: bool) -> None:
    """Print a block: its tables, notes and problems."""
    print(f"\n## {result.number}. {result.title}: {result.status}, {result.seconds:.1f} s\n")
    for table in result.findings.tables:
        mark = f" ({NO_MEASUREMENT})" if is_simulated else ""
        print(f"{table.title}{mark}\n")
        print(markdown_table(table.header, table.rows, NUM_TEXT_COLUMNS) + "\n")
    for note in result.findings.notes:
        print(f"- {note}")
    for problem in result.findings.problems:
        print(f"- PROBLEM: {problem}")


def print_summary(results: Sequence[Result]) -> None:
    """Print a line a block."""
    rows = [
        [f"{one.number}. {one.title}", one.status, f"{one.seconds:.1f}", str(_first(one))]
        for one in results
    ]
    print("\n" + markdown_table(("block", "status", "seconds", "first problem"), rows))


def _first(result: Result) -> str:
    found = result.findings
    return (found.problems or (found.notes if result.status == "skipped" else []) or [""])[0]
