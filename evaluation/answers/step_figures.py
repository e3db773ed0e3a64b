"""How drafting went, from the counts in answer rows: acceptance by place and by source, time by part.

The counts are optional keys (`step_counts.py` writes them); rows without them, such as other
people's, are passed over. Every choice of every question counts, failed rows have none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import pandas as pd

from evaluation.answers.row import AnswerRow, Choice

PARTS = ("draft", "forward", "verify", "keep", "observe")


def acceptance_rate(rows: Iterable[AnswerRow]) -> float:
    """Return the share of drafted nodes that were accepted; NaN if nothing is known to be drafted."""
    counts = node_counts(rows)
    num_drafted = counts["drafted"].sum()
    return float(counts["accepted"].sum() / num_drafted) if num_drafted else math.nan


def node_counts(rows: Iterable[AnswerRow]) -> pd.DataFrame:
    """Return how many nodes were drafted and accepted at every place of the tree.

    Returns:
        Columns: `depth` (the root's children have 1), `rank` (place among the siblings, from
        0), `drafted` (above 0), `accepted`; empty if no row has counts.
    """
    drafted: Counter[tuple[int, int]] = Counter()
    accepted: Counter[tuple[int, int]] = Counter()
    for choice in _choices(rows):
        _count(choice.drafted, drafted)
        _count(choice.accepted, accepted)
    found = [(*place, count, accepted[place]) for place, count in sorted(drafted.items()) if count]
    return pd.DataFrame(found, columns=["depth", "rank", "drafted", "accepted"])


def source_counts(rows: Iterable[AnswerRow]) -> pd.DataFrame:
    """Return how many nodes each source drafted and had accepted.

    Returns:
        Index: the source's name. Columns: `drafted`, `accepted`; empty if none is named.
    """
    found = [
        {"source": name, "drafted": drafted, "accepted": accepted}
        for choice in _choices(rows)
        for sources in choice.sources
        for name, (drafted, accepted) in sources.items()
    ]
    table = pd.DataFrame(found, columns=["source", "drafted", "accepted"])
    return table.groupby("source").sum()


def time_shares(rows: Iterable[AnswerRow]) -> dict[str, float]:
    """Return the share of each part in the time of all steps; empty if no row has times."""
    times = [times for choice in _choices(rows) for times in choice.step_times]
    seconds = pd.DataFrame(times, columns=list(PARTS)).sum()
    total = seconds.sum()
    return {part: float(seconds[part] / total) for part in PARTS} if total > 0 else {}


def _count(turns: list[list[list[int]]], counts: Counter[tuple[int, int]]) -> None:
    """Add the counts of turns, which are by [depth - 1][rank]."""
    for levels in turns:
        for depth, ranks in enumerate(levels, start=1):
            counts.update({(depth, rank): count for rank, count in enumerate(ranks)})


def _choices(rows: Iterable[AnswerRow]) -> Iterator[Choice]:
    for row in rows:
        yield from row.choices
