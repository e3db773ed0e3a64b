"""Spec-Bench's speed figures of a method against a baseline, per task, as a table and as JSON.

``metrics.py`` says how the figures are made. Without ``--tokenizer-path`` both sides are measured by
the tokens they counted; with it the baseline's tokens are counted from its text, as Spec-Bench does.
Several files are several runs: run i of the method is compared with run i of the baseline.

Run:
    python -m evaluation.speed --file-path recycling.jsonl --base-path vanilla.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.command_line import OptionParser, UserError, run_command
from evaluation.metrics import (
    COUNTS,
    FIGURES,
    RunFigures,
    Tokenizer,
    left_out_text,
    over_runs,
    spec_bench_figures,
)
from evaluation.read_answers import read_answers, read_meta
from evaluation.tables import cell, json_line, markdown_table, task_title

# A ratio of two speeds means something only when these were the same on both sides.
CONDITIONS = (
    *("model_path", "model_fingerprint", "device", "dtype"),
    *("threads", "max_new_tokens", "temperature"),
)
HEADER = ("Task", "Questions", "#Mean accepted tokens", "Tokens/s", "Baseline tokens/s", "Speed-up")
EXAMPLES = """\
examples:
  python -m evaluation.speed --file-path recycling.jsonl --base-path vanilla.jsonl
  python -m evaluation.speed --file-path run_1/pld.jsonl run_2/pld.jsonl \\
      --base-path run_1/vanilla.jsonl run_2/vanilla.jsonl
  python -m evaluation.speed --file-path a.jsonl --base-path b.jsonl \\
      --tokenizer-path lmsys/vicuna-7b-v1.3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, what is left out, and one line of JSON; return the exit code.

    Args:
        argv: The command line's words; None takes the process's own.

    Raises:
        UserError: The files are not what they should be; one line says why.
    """
    options = _parse(argv)
    pairs = _pair_runs(options.file_path, options.base_path)
    tokenizer = _load_tokenizer(options.tokenizer_path) if options.tokenizer_path else None
    warnings = [text for pair in pairs for text in differing_conditions(*pair)]
    for text in warnings:
        print(f"WARNING: not measured under the same conditions: {text}", file=sys.stderr)
    runs = [
        spec_bench_figures(read_answers(path), read_answers(base), tokenizer, (path, base))
        for path, base in pairs
    ]
    notes = [left_out_text(run, pair) for pair, run in zip(pairs, runs, strict=True)]
    left_out = [note for note in notes if note]
    figures = over_runs(runs)
    print("\n".join((_table(figures), *left_out)))
    report = {
        "file_path": options.file_path,
        "base_path": options.base_path,
        "runs": figures.num_runs,
        "baseline_tokens": "retokenised" if tokenizer else "counted",
        "tasks": _report_tasks(figures),
        "left_out": left_out,
        "warnings": warnings,
    }
    print(json_line(report))
    return 0


def differing_conditions(path: str | Path, base_path: str | Path) -> list[str]:
    """Say in which conditions two answer files' sidecars disagree; what either lacks is not compared.

    Raises:
        UserError: A sidecar is not readable.
    """
    meta, base_meta = read_meta(path), read_meta(base_path)
    return [
        f"{key} is {meta[key]!r} in {path} but {base_meta[key]!r} in {base_path}"
        for key in CONDITIONS
        if key in meta and key in base_meta and meta[key] != base_meta[key]
    ]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m evaluation.speed",
        description="Speed-up, mean accepted tokens and tokens/s per task, as Spec-Bench counts them.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--file-path",
        nargs="+",
        required=True,
        metavar="A",
        help="answer file of the method; several are runs: mean and deviation are shown",
    )
    parser.add_argument(
        "--base-path",
        nargs="+",
        required=True,
        metavar="B",
        help="answer file of the baseline, one for each of --file-path",
    )
    parser.add_argument(
        "--tokenizer-path",
        metavar="T",
        help="count the baseline's tokens from its text with this tokenizer, minus one a turn, as "
        "Spec-Bench does (default: the tokens the baseline counted)",
    )
    return parser.parse_args(argv)


def _pair_runs(paths: Sequence[str], base_paths: Sequence[str]) -> list[tuple[str, str]]:
    if len(paths) != len(base_paths):
        raise UserError(
            f"--file-path names {len(paths)} runs and --base-path {len(base_paths)}; "
            "give one baseline file for each run"
        )
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise UserError("--file-path names a file twice; give a different file for each run")
    return list(zip(paths, base_paths, strict=True))


def _load_tokenizer(path: str) -> Tokenizer:
    from transformers import AutoTokenizer  # imported late: it takes seconds

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"no tokenizer at --tokenizer-path {path}: {reason}") from None


def _table(figures: RunFigures) -> str:
    units = ("", "", "", "x")
    rows = []
    for task in figures.mean.index:
        cells = [
            cell(figures.figure(task, name), figures.spread(task, name), unit)
            for name, unit in zip(FIGURES, units, strict=True)
        ]
        rows.append([task_title(task), f"{figures.figure(task, 'questions'):.0f}", *cells])
    return markdown_table(HEADER, rows)


def _report_tasks(figures: RunFigures) -> dict[str, dict[str, Any]]:
    report: dict[str, dict[str, Any]] = {}
    for task in figures.mean.index:
        report[task] = {name: int(figures.figure(task, name)) for name in COUNTS}
        for name in FIGURES:
            report[task][name] = figures.figure(task, name)
            if figures.num_runs > 1:
                report[task][f"{name}_std"] = figures.spread(task, name)
    return report


if __name__ == "__main__":
    run_command(main)
