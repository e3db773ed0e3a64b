"""Speed figures of a method against a baseline, per task, as tables and, on request, as JSON.

`scoring/figures.py` says how the figures are made, docs/numbers.md when its two rulers differ. Without
`--tokenizer-path` both sides are measured by the tokens they counted; with it the legacy ruler
counts the baseline's tokens from its text, as Spec-Bench does. Several files are several runs: run
i of the method is compared with run i of the baseline.

Run:
    python -m evaluation.speed --file-path recycling.jsonl --base-path vanilla.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from evaluation.answers.answer_file import (
    Categories,
    add_category_options,
    add_tokenizer_option,
    load_tokenizer,
)
from evaluation.answers.defects import check_limit
from evaluation.answers.differences import Equality
from evaluation.answers.row import AnswerRow
from evaluation.answers.step_figures import acceptance_rate, node_counts, source_counts, time_shares
from evaluation.reporting.tables import bounds_text, figure_text, json_line, markdown_table
from evaluation.reporting.titles import task_title
from evaluation.scoring.comparable import differing_conditions, equality_of_files, load_answers
from evaluation.scoring.figures import (
    COUNTS,
    EXACT_FIGURES,
    FIGURES,
    INTERVALS,
    LEGACY_COUNTS,
    OVERALL,
    RunFigures,
    left_out_text,
    measure_runs,
)
from evaluation.scoring.intervals import TOO_FEW, prefill_gap, prefill_warnings
from evaluation.scoring.ledger import broken_identities, too_fast
from evaluation.scoring.per_question import (
    Tokenizer,
    question_frame,
    uncategorised_text,
    used_defects_text,
)
from model.commands.command_line import OptionParser, UserError, run_command

COUNTED = ("drafted", "accepted")


class Ruler(NamedTuple):
    """A table of its own."""

    title: str
    counted: str  # what its column of numbers counts: rows or questions
    columns: dict[str, str]  # figures by the titles of their columns


RULERS = {
    "legacy": Ruler(
        "Legacy ruler (Spec-Bench's arithmetic)",
        "rows",
        {
            "#Mean accepted tokens": "mean_accepted_tokens",
            "Tokens/s": "tokens_per_second",
            "Baseline tokens/s": "base_tokens_per_second",
            "Speed-up": "speedup",
        },
    ),
    "exact": Ruler(
        "Exact ruler (token-weighted, sound rows on both sides)",
        "questions",
        {
            "MAT": "exact_mean_accepted_tokens",
            "Tokens/s": "exact_tokens_per_second",
            "Baseline tokens/s": "exact_base_tokens_per_second",
            "Speed-up": "exact_speedup",
            "Decode tokens/s": "decode_tokens_per_second",
            "Decode speed-up": "decode_speedup",
            "Break-even MAT": "break_even_mat",
            "CPU ms / token": "cpu_ms_per_token",
            "Baseline CPU ms / token": "base_cpu_ms_per_token",
            "CPU ratio": "cpu_ratio",
        },
    ),
}
# Figures that are so many times the baseline's.
RATIOS = (*INTERVALS, "cpu_ratio")
EXAMPLES = """\
examples:
  python -m evaluation.speed --file-path recycling.jsonl --base-path vanilla.jsonl
  python -m evaluation.speed --file-path run_1/pld.jsonl run_2/pld.jsonl \\
      --base-path run_1/vanilla.jsonl run_2/vanilla.jsonl --ruler exact --drafting
  python -m evaluation.speed --file-path a.jsonl --base-path b.jsonl --ruler legacy \\
      --tokenizer-path lmsys/vicuna-7b-v1.3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and the questions left out, JSON on request; return the exit code."""
    options = _parse(argv)
    pairs = _pair_runs(options.file_path, options.base_path)
    tokenizer = load_tokenizer(options.tokenizer_path)
    warnings = [text for pair in pairs for text in differing_conditions(*pair)]
    for text in warnings:
        print(f"WARNING: not measured under the same conditions: {text}", file=sys.stderr)
    paths = dict.fromkeys(path for pair in pairs for path in pair)
    # Each once: a pipe cannot be read again.
    categories = Categories(options.question_file, options.category_map)
    files = {path: load_answers(Path(path), categories) for path in paths}
    gaps = [
        prefill_gap(files[path].rows, files[base].rows, (path, base))
        for path, base in pairs
        if not files[path].record.ran_in_turn_with(files[base].record)
    ]
    unequal = prefill_warnings([gap for gap in gaps if gap])
    for text in unequal:
        print(f"WARNING: {text}", file=sys.stderr)

    def frame(path: str, tokenizer: Tokenizer | None = None) -> pd.DataFrame:
        limit = options.max_new_tokens or files[path].record.max_new_tokens
        return question_frame(files[path].rows, limit, tokenizer)

    runs = [(frame(path), frame(base, tokenizer)) for path, base in pairs]
    figures = measure_runs(runs, pairs[0])
    equality = equality_of_files((files[path], files[base]) for path, base in pairs)
    if equality.is_broken:
        lossy = f"not lossless: {equality} questions have other answers than the baseline's"
        warnings.append(lossy)
        print(f"WARNING: {lossy}; python -m evaluation.equal shows them", file=sys.stderr)
    compared = [(files[path], files[base]) for path, base in pairs]
    broken = [fast.text(*pairs[0]) for fast in too_fast(compared, figures)]
    broken += [one.text for one in broken_identities(compared, figures)]
    for text in broken:
        print(f"WARNING: {text}", file=sys.stderr)
    notes = [*unequal, *filter(None, _notes(pairs, runs, figures.of_runs))]
    if not figures.interval(OVERALL, "exact_speedup").is_known:
        notes.append(f"Intervals: {TOO_FEW}")
    notes = list(dict.fromkeys(notes))
    names = list(RULERS) if options.ruler == "both" else [options.ruler]
    parts = [f"{RULERS[name].title}\n\n{_ruler_table(figures, RULERS[name])}" for name in names]
    rows = [row for path, _ in pairs for row in files[path].rows]
    drafting = _drafting_report(rows) if options.drafting or options.json else {}
    if options.drafting:
        parts.append(_drafting_text(drafting))
    print(
        "\n\n".join(
            [*broken, _equality_text(equality), *parts, *(["\n".join(notes)] if notes else [])]
        )
    )
    if not options.json:
        return 0
    report = {
        "file_path": options.file_path,
        "base_path": options.base_path,
        "runs": figures.num_runs,
        "baseline_tokens": "retokenised" if tokenizer else "counted",
        "tasks": _report_tasks(figures),
        "drafting": drafting,
        "compared_answers": equality.num_compared,
        "other_answers": equality.num_differing if equality.num_compared else None,
        "is_lossless": equality.is_lossless,
        "notes": notes,
        "warnings": [*warnings, *unequal, *broken],
    }
    print(json_line(report))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m evaluation.speed",
        description="Speed-up, mean accepted tokens and tokens/s per task, by two rulers.",
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
        "--ruler",
        choices=(*RULERS, "both"),
        default="both",
        help="legacy: as Spec-Bench counts; exact: token-weighted, paired (default: both)",
    )
    parser.add_argument(
        "--drafting",
        action="store_true",
        help="show acceptance by depth, rank and source, and the time of each part of a step",
    )
    parser.add_argument(
        "--json", action="store_true", help="print all figures as one line of JSON below the tables"
    )
    add_tokenizer_option(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="maximum of new tokens in a turn, past which the exact ruler counts none (default: the "
        "sidecar's, if there is one)",
    )
    add_category_options(parser)
    options = parser.parse_args(argv)
    check_limit(options.max_new_tokens)
    if options.tokenizer_path and options.ruler == "exact":
        raise UserError(
            "--tokenizer-path: got it with --ruler exact, which counts tokens; leave one out"
        )
    return options


def _pair_runs(paths: Sequence[str], base_paths: Sequence[str]) -> list[tuple[str, str]]:
    if len(paths) != len(base_paths):
        raise UserError(
            f"--file-path names {len(paths)} runs and --base-path {len(base_paths)}; "
            "give one baseline file for each run"
        )
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise UserError("--file-path names a file twice; give a different file for each run")
    return list(zip(paths, base_paths, strict=True))


def _notes(
    pairs: Sequence[tuple[str, str]],
    runs: Sequence[tuple[pd.DataFrame, pd.DataFrame]],
    of_runs: Sequence[pd.DataFrame],
) -> Iterator[str | None]:
    """Yield rows with a defect that the figures include, and questions that they leave out, or None."""
    for names, frames, figures in zip(pairs, runs, of_runs, strict=True):
        yield from map(used_defects_text, frames, names)
        yield from map(uncategorised_text, frames, names)
        yield left_out_text(figures, names)


def _equality_text(equality: Equality) -> str:
    if not equality.num_compared:
        return "Answers are not compared with the baseline's: they were sampled, or the files share none"
    word = "NOT LOSSLESS: answers" if equality.is_broken else "Answers"
    by_text = (
        f" (texts of {equality.num_by_text}, which lack tokens)" if equality.num_by_text else ""
    )
    return f"{word} other than the baseline's: {equality}{by_text}"


def _ruler_table(figures: RunFigures, ruler: Ruler) -> str:
    """Return a ruler's table, one row a task, speed-ups with intervals; CPU time where the answers have it."""
    columns = {
        title: name
        for title, name in ruler.columns.items()
        if "cpu" not in name or figures.mean[name].notna().any()
    }
    header = ["Task", "Questions"]
    for title, name in columns.items():
        header += [title] + (["95%"] if name in INTERVALS else [])
    rows = []
    for task in figures.mean.index:
        row = [task_title(task), f"{figures.figure(task, ruler.counted):.0f}"]
        for name in columns.values():
            unit = "x" if name in RATIOS else ""
            row.append(figure_text(figures.figure(task, name), figures.spread(task, name), unit))
            if name in INTERVALS:
                interval = figures.interval(task, name)
                bounds = bounds_text(interval) if interval.is_known else "-"
                is_same = interval.is_known and not interval.excludes_one
                row.append(f"{bounds} not different" if is_same else bounds)
        rows.append(row)
    return markdown_table(header, rows)


def _drafting_report(rows: Sequence[AnswerRow]) -> dict[str, Any]:
    """Return acceptance and time shares of the drafts; NaN and empty lists where rows have no counts."""
    nodes = node_counts(rows)
    return {
        "acceptance_rate": acceptance_rate(rows),
        **{
            by: nodes.groupby(by)[list(COUNTED)].sum().reset_index().to_dict("records")
            for by in ("depth", "rank")
        },
        "source": source_counts(rows).reset_index().to_dict("records"),
        "time_shares": time_shares(rows),
    }


def _drafting_text(drafting: dict[str, Any]) -> str:
    if not drafting["time_shares"]:
        return "Drafting: the answers have no counts of it"
    shares = [f"{part} {100 * share:.1f}%" for part, share in drafting["time_shares"].items()]
    rate = _percent(drafting["acceptance_rate"], 1) if drafting["depth"] else "-"
    parts = [f"Drafting: {rate} of drafted nodes accepted; time of a step: {', '.join(shares)}"]
    for by in ("depth", "rank", "source"):
        rows = [
            [
                *(str(line[key]) for key in (by, *COUNTED)),
                _percent(line["accepted"], line["drafted"]),
            ]
            for line in drafting[by]
        ]
        if rows:
            parts.append(markdown_table([by.capitalize(), "Drafted", "Accepted", "Rate"], rows))
    return "\n\n".join(parts)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%"


def _report_tasks(figures: RunFigures) -> dict[str, dict[str, Any]]:
    report: dict[str, dict[str, Any]] = {}
    for task in figures.mean.index:
        report[task] = {name: int(figures.figure(task, name)) for name in (*COUNTS, *LEGACY_COUNTS)}
        for name in (*FIGURES, *EXACT_FIGURES):
            report[task][name] = figures.figure(task, name)
            if figures.num_runs > 1:
                report[task][f"{name}_std"] = figures.spread(task, name)
        for name in INTERVALS:
            interval = figures.interval(task, name)
            report[task][f"{name}_interval"] = interval
            report[task][f"{name}_is_different"] = interval.excludes_one
    return report


if __name__ == "__main__":
    run_command(main)
