"""How drafting went: sums over a turn's steps for answer rows, and figures from these.

A row keeps counts, not steps: how many nodes were drafted and accepted at every place of the tree,
from which source, and how long each part of the steps took. They are optional keys; rows without
them, such as other people's, are passed over. Every choice of every question counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from evaluation.answers.row import AnswerRow, Choice

if TYPE_CHECKING:  # reports open without torch
    from model.engine.step import StepRecord

# Depth in the tree (the root's children have 1) and place among the siblings (from 0).
NodePlace = tuple[int, int]

PARTS = ("draft", "forward", "verify", "keep", "observe")


def step_counts(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the counts of one turn's steps, all JSON-able.

    Returns:
        `draft_tokens`: nodes drafted, roots excluded. `drafted`: the same by place,
        `drafted[depth - 1][rank]`. `accepted`, of the same shape: those whose tokens were
        emitted. `sources`: drafted and accepted by the name of their source, empty where the
        drafter names none. `step_nodes`: nodes that each step drafted, 0 without a draft. `step_times`: seconds by
        part, of which each text of a batch has a share.
    """
    drafted: Counter[NodePlace] = Counter()
    accepted: Counter[NodePlace] = Counter()
    sources: dict[str, list[int]] = {}
    for topology, count in Counter(step.tree.topology for step in steps).items():
        places = zip(topology.depths[1:], topology.ranks[1:], strict=True)
        drafted.update({place: count * number for place, number in Counter(places).items()})
    for step in steps:
        nodes, topology = step.accepted_nodes, step.tree.topology
        accepted.update((topology.depths[node], topology.ranks[node]) for node in nodes)
        names = step.tree.sources or ()
        for name in names[1:]:
            sources.setdefault(name, [0, 0])[0] += 1
        for node in nodes if names else ():
            sources[names[node]][1] += 1
    return {
        "draft_tokens": drafted.total(),
        "drafted": _by_place(drafted, drafted),
        "accepted": _by_place(accepted, drafted),
        "sources": sources,
        "step_nodes": [step.num_nodes - 1 for step in steps],
        "step_times": {
            part: sum(getattr(step, f"{part}_ns") / step.num_texts for step in steps) / 1e9
            for part in PARTS
        },
    }


def _by_place(counts: Counter[NodePlace], shape: Counter[NodePlace]) -> list[list[int]]:
    """Lay counts out as [depth - 1][rank], as far as `shape` reaches."""
    widths: dict[int, int] = {}
    for depth, rank in shape:
        widths[depth] = max(widths.get(depth, 0), rank + 1)
    return [[counts[depth, rank] for rank in range(widths[depth])] for depth in sorted(widths)]


def acceptance_rate(rows: Iterable[AnswerRow]) -> float:
    """Return the share of drafted nodes that were accepted; NaN if nothing is known to be drafted."""
    counts = node_counts(rows)
    num_drafted = counts["drafted"].sum()
    return float(counts["accepted"].sum() / num_drafted) if num_drafted else math.nan


def node_counts(rows: Iterable[AnswerRow]) -> pd.DataFrame:
    """Return how many nodes were drafted and accepted at every place of the tree.

    Columns: `depth` (the root's children have 1), `rank` (place among the siblings, from 0),
    `drafted` (above 0), `accepted`; empty if no row has counts.
    """
    drafted: Counter[NodePlace] = Counter()
    accepted: Counter[NodePlace] = Counter()
    for choice in _choices(rows):
        _count(choice.drafted, drafted)
        _count(choice.accepted, accepted)
    found = [(*place, count, accepted[place]) for place, count in sorted(drafted.items()) if count]
    return pd.DataFrame(found, columns=["depth", "rank", "drafted", "accepted"])


def source_counts(rows: Iterable[AnswerRow]) -> pd.DataFrame:
    """Return how many nodes each source `drafted` and had `accepted`, by its name; empty if none is named."""
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


def _count(turns: list[list[list[int]]], counts: Counter[NodePlace]) -> None:
    """Add the counts of turns, which are by [depth - 1][rank]."""
    for levels in turns:
        for depth, ranks in enumerate(levels, start=1):
            counts.update({(depth, rank): count for rank, count in enumerate(ranks)})


def _choices(rows: Iterable[AnswerRow]) -> Iterator[Choice]:
    for row in rows:
        yield from row.choices
