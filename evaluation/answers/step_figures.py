"""How drafting went, from the counts in answer rows: acceptance by place and by source, time by part.

The counts are optional keys (`step_counts.py` writes them); rows without them, such as other
people's, are passed over. Every choice of every question counts, failed rows have none.

Use:
    node_counts(rows).groupby("depth")[["drafted", "accepted"]].sum()
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from evaluation.answers.rows import Row

PARTS = ("draft", "forward", "verify", "keep", "observe")


def acceptance_rate(rows: Iterable[Row]) -> float:
    """Return the share of drafted nodes that were accepted; NaN if nothing is known to be drafted."""
    counts = node_counts(rows)
    num_drafted = counts["drafted"].sum()
    return float(counts["accepted"].sum() / num_drafted) if num_drafted else math.nan


def node_counts(rows: Iterable[Row]) -> pd.DataFrame:
    """Return how many nodes were drafted and accepted at every place of the tree.

    Returns:
        Columns: ``depth`` (the root's children have 1), ``rank`` (place among the siblings, from
        0), ``drafted`` (above 0), ``accepted``; empty if no row has counts.
    """
    rows = list(rows)
    counts: dict[str, Counter[tuple[int, int]]] = {"drafted": Counter(), "accepted": Counter()}
    for name, of_place in counts.items():
        for levels in _turns(rows, name):
            for depth, ranks in enumerate(levels, start=1):
                of_place.update({(depth, rank): count for rank, count in enumerate(ranks)})
    found = [
        (*place, count, counts["accepted"][place])
        for place, count in sorted(counts["drafted"].items())
        if count
    ]
    return pd.DataFrame(found, columns=["depth", "rank", "drafted", "accepted"])


def source_counts(rows: Iterable[Row]) -> pd.DataFrame:
    """Return how many nodes each source drafted and had accepted.

    Returns:
        Index: the source's name. Columns: ``drafted``, ``accepted``; empty if none is named.
    """
    found = [
        {"source": name, "drafted": drafted, "accepted": accepted}
        for sources in _turns(rows, "sources")
        for name, (drafted, accepted) in sources.items()
    ]
    table = pd.DataFrame(found, columns=["source", "drafted", "accepted"])
    return table.groupby("source").sum()


def time_shares(rows: Iterable[Row]) -> dict[str, float]:
    """Return the share of each part in the time of all steps; empty if no row has times."""
    seconds = pd.DataFrame(list(_turns(rows, "step_times")), columns=list(PARTS)).sum()
    total = seconds.sum()
    return {part: float(seconds[part] / total) for part in PARTS} if total > 0 else {}


def _turns(rows: Iterable[Row], key: str) -> Iterator[Any]:
    """What every turn of every choice has under a key."""
    for row in rows:
        for choice in row["choices"]:
            yield from choice.get(key, ())
