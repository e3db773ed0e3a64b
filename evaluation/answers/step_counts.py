"""Sums over the steps of one turn, small enough for an answer row.

A row keeps counts, not steps: how many nodes were drafted and accepted at every place of the tree,
from which source, and how long each part of the steps took. `step_figures.py` reads them back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from evaluation.answers.step_figures import PARTS
from model.engine.step import StepRecord

# Depth in the tree (the root's children have 1) and place among the siblings (from 0).
NodePlace = tuple[int, int]


def step_counts(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the counts of one turn's steps, all JSON-able.

    Returns:
        `draft_tokens`: nodes drafted, roots excluded. `drafted`: the same by place,
        `drafted[depth - 1][rank]`. `accepted`, of the same shape: those whose tokens were
        emitted. `sources`: drafted and accepted by the name of their source, empty where the
        drafter names none. `step_times`: seconds by part.
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
        "step_times": {
            part: sum(getattr(step, f"{part}_ns") for step in steps) / 1e9 for part in PARTS
        },
    }


def _by_place(counts: Counter[NodePlace], shape: Counter[NodePlace]) -> list[list[int]]:
    """Lay counts out as [depth - 1][rank], as far as `shape` reaches."""
    widths: dict[int, int] = {}
    for depth, rank in shape:
        widths[depth] = max(widths.get(depth, 0), rank + 1)
    return [[counts[depth, rank] for rank in range(widths[depth])] for depth in sorted(widths)]
