"""The CSV files of speculators' evaluate.py: acceptance.csv, perf_results.csv, and acceptance by length and place.

Columns: vllm-project/speculators, scripts/evaluate. All of them count drafted steps alone, as vLLM's counters do;
`subset` is a category.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.answers.row import AnswerRow
from evaluation.formats.bins import bin_records, by_position, by_start_length
from evaluation.formats.steps import AcceptanceSums, TurnSteps, acceptance_sums, by_category
from model.commands.command_line import UserError
from model.commands.files import read_text, write_whole

ACCEPTANCE, PERFORMANCE = "acceptance.csv", "perf_results.csv"
BY_START, BY_POSITION = "acceptance_by_start_length.csv", "acceptance_by_position.csv"
MAX_BYTES = 2**28


def write_folder(folder: Path, rows: Sequence[AnswerRow], turns: Sequence[TurnSteps]) -> None:
    """Write an answer file's acceptance and times into a folder, which is there.

    Raises:
        UserError: if it is not known which steps drafted, or a file cannot be written.
    """
    if not all(turn.knows_drafts for turn in turns):
        raise UserError(
            "to: got speculators for answers that do not say which steps drafted (step_nodes); allowed: answers "
            "of this version of the commands"
        )
    parts = by_category(turns)
    accepted = {name: _acceptance(acceptance_sums(part)) for name, part in parts.items()}
    write_whole(
        folder / ACCEPTANCE, _csv([{"subset": name, **it} for name, it in accepted.items()])
    )
    times = [
        {**_performance(name, [row for row in rows if row.category == name]), **accepted[name]}
        for name in parts
    ]
    write_whole(folder / PERFORMANCE, _csv(times))
    write_whole(folder / BY_START, _csv(bin_records(by_start_length(turns), True)))
    write_whole(folder / BY_POSITION, _csv(bin_records(by_position(turns), False)))


def read_folder(folder: Path) -> dict[str, AcceptanceSums]:
    """Return the counts of acceptance.csv by category, those of all under "".

    Raises:
        UserError: if it cannot be read, or lacks a column.
    """
    file = folder / ACCEPTANCE
    found = {"": AcceptanceSums(drafts=0, draft_tokens=0, accepted=0)}
    for number, line in enumerate(
        csv.DictReader(io.StringIO(read_text(file, "acceptance", MAX_BYTES))), start=2
    ):
        try:
            sums = AcceptanceSums(
                drafts=float(line["num_drafts"]),
                draft_tokens=float(line["num_draft_tokens"]),
                accepted=float(line["num_accepted_tokens"]),
            )
            places = [float(line[key]) for key in line if key.startswith("acceptance_at_pos_")]
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{file}, line {number}: got no counts of drafts; give speculators' acceptance.csv"
            ) from None
        sums.at_position = [round(share * sums.drafts) for share in places]
        found[line["subset"]] = sums
        for name in ("drafts", "draft_tokens", "accepted"):
            setattr(found[""], name, getattr(found[""], name) + getattr(sums, name))
    return found


def read_bins(file: Path) -> list[dict[str, str | float]]:
    """Return the records of acceptance_by_start_length.csv or acceptance_by_position.csv."""
    lines = csv.DictReader(io.StringIO(read_text(file, "bins", MAX_BYTES)))
    return [
        {key: value if key == "bucket" else float(value) for key, value in line.items()}
        for line in lines
    ]


def _acceptance(sums: AcceptanceSums) -> dict[str, float]:
    drafts = sums.drafts
    return {
        "num_drafts": drafts,
        "num_draft_tokens": sums.draft_tokens,
        "num_accepted_tokens": sums.accepted,
        "acceptance_length": sums.per_drafted_step if drafts else 0,
        **{
            f"acceptance_at_pos_{place}": count / drafts
            for place, count in enumerate(sums.at_position)
        },
    }


def _performance(category: str, rows: Sequence[AnswerRow]) -> dict[str, Any]:
    """Return a line of times: medians over turns; what was not measured is empty."""
    choices = [choice for row in rows if not row.is_failed for choice in row.choices]
    walls = [seconds for choice in choices for seconds in choice.wall_time]
    tokens = [count for choice in choices for count in choice.new_tokens]
    firsts = [seconds for choice in choices for seconds in choice.time_to_first_token]
    turns = list(zip(tokens, walls, firsts, strict=False))
    gaps = [(wall - first) / (count - 1) for count, wall, first in turns if count > 1]
    seconds = sum(choice.seconds for choice in choices)
    return {
        "subset": category,
        "strategy": "concurrent" if any(choice.share_time for choice in choices) else "synchronous",
        "target_rate": "",
        "rps_median": len(walls) / seconds if seconds else "",
        "latency_median_s": statistics.median(walls) if walls else "",
        "itl_median_ms": 1000 * statistics.median(gaps) if gaps else "",
        "ttft_median_ms": 1000 * statistics.median(firsts) if firsts else "",
        "output_tps_median": statistics.median(
            count / wall for count, wall in zip(tokens, walls, strict=True)
        )
        if walls
        else "",
        "total_output_tokens": sum(tokens),
    }


def _csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV; a column that some lack is empty there."""
    columns = dict.fromkeys(key for record in records for key in record)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
