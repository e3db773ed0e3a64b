"""Write the README's table of results from the stored reports of evaluation.leaderboard.

The README names the reports between two marks, one report a column; the table between them is
made from these files alone, so that no figure is copied by hand.

Run:
    python -m evaluation.leaderboard ANSWERS --no-published --json docs/benchmarks/NAME.json
    python -m scripts.benchmark.results            # writes README.md
    python -m scripts.benchmark.results --check    # only says whether it is as the files are
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.reporting.tables import markdown_table
from evaluation.reporting.titles import method_title
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import write_whole
from model.commands.known_models import KNOWN_MODELS, MODELS_FOLDER

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BEGIN, END = "<!-- results of", "<!-- end of results -->"
MARKED = re.compile(rf"({BEGIN} ([^>]+?) -->\n).*?({END})", re.DOTALL)
MODEL_TITLES = {
    "demo/model": "Demo model, 7M",
    **{f"{MODELS_FOLDER.name}/{name}": known.title for name, known in KNOWN_MODELS.items()},
}

Row = Mapping[str, Any]


def with_results(text: str, folder: Path) -> str:
    """Return a page with its table made anew from the reports that it names, relative to a folder.

    Raises:
        UserError: if the page has no marks, or a report cannot be read.
    """
    found = MARKED.search(text)
    if not found:
        raise UserError(f"README: has no table between '{BEGIN} FILE... -->' and '{END}'")
    reports = [_read(folder / name) for name in found[2].split()]
    return (
        text[: found.start()] + found[1] + results(reports) + "\n" + found[3] + text[found.end() :]
    )


def results(reports: Sequence[Sequence[Row]]) -> str:
    """Return the table of some reports, a column each: rows of methods, fastest of the first report first."""
    names = list(dict.fromkeys(row["method"] for report in reports for row in report))
    header = ["method", *(_column(report[0]) for report in reports)]
    body = []
    for name in names:
        rows = [next((row for row in report if row["method"] == name), None) for report in reports]
        body.append([method_title(name), *("-" if row is None else _cell(row) for row in rows)])
    return "\n".join((*_captions(reports), "", markdown_table(header, body)))


def _captions(reports: Sequence[Sequence[Row]]) -> list[str]:
    """Return a line for all reports of the same conditions, with the ratios that each cannot tell apart."""
    groups: dict[str, list[Sequence[Row]]] = {}
    for report in reports:
        groups.setdefault(_conditions(report), []).append(report)
    lines = []
    for conditions, group in groups.items():
        columns = "; ".join(_column(report[0]) for report in group)
        floors = ", ".join(filter(None, map(_floor, group)))
        differ = f"; two runs of vanilla differ by {floors}" if floors else ""
        lines.append(f"{columns}: {conditions}{differ}.")
    return lines


def _read(file: Path) -> list[Row]:
    """Return the measured rows of a report, all of one group.

    Raises:
        UserError: if it is not such a report.
    """
    try:
        rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))["measured"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: is no report of evaluation.leaderboard: {error}") from error
    if not rows or len({(_conditions([row]), _floor([row])) for row in rows}) > 1:
        raise UserError(f"{file}: holds several groups or none; report one comparison")
    return rows


def _column(row: Row) -> str:
    model = row["model"].partition("@")[0]
    return f"{MODEL_TITLES.get(model, model)}, {row['dtype']}"


def _conditions(report: Sequence[Row]) -> str:
    row = report[0]
    runs = f" x {row['runs']}" if row["runs"] > 1 else ""
    threads = f"{row['threads']} thread{'s' * (row['threads'] != '1')}"
    return (
        f"{row['questions']} questions of {row['bench']}{runs}, at most {row['max_new_tokens']} new tokens, "
        f"{row['device']}, {threads}, commit {row['commit']}"
    )


def _floor(report: Sequence[Row]) -> str:
    """Return the interval of the ratio of two runs of vanilla; nothing if it ran once."""
    low, high = (report[0].get(f"exact_speedup_noise_floor_{end}") for end in ("low", "high"))
    return f"[{low:.2f}, {high:.2f}]" if low and high else ""


def _cell(row: Row) -> str:
    parts = [f"{row['exact_tokens_per_second']:.1f} tokens/s", f"{row['exact_speedup']:.2f}x"]
    low, high = row["exact_speedup_low"], row["exact_speedup_high"]
    if not row["is_baseline"] and low and high:
        parts[-1] += f" [{low:.2f}, {high:.2f}]"
    return ", ".join((*parts, f"MAT {row['exact_mean_accepted_tokens']:.2f}"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(prog="python -m scripts.benchmark.results", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if it differs"
    )
    options = parser.parse_args(argv)
    text = README.read_text(encoding="utf-8")
    made = with_results(text, ROOT)
    if options.check:
        print("as the files are" if made == text else "README.md differs from the files")
        return int(made != text)
    write_whole(README, made)
    return 0


if __name__ == "__main__":
    run_command(main)
