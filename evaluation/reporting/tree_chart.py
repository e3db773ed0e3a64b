"""The picture of a draft tree: which guesses are accepted, by their depth and rank."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.collections import LineCollection
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from evaluation.reporting.chart_style import STYLE, WIDTH, figure_of

LEAST_LABELLED = 14  # points; in smaller circles the colour alone tells the share
LEAST_ROOT = 18  # the word is wider than two digits
CENTRED: Any = {"ha": "center", "va": "center", "fontsize": 6.5, "zorder": 4}


@matplotlib.rc_context(STYLE)
def tree_chart(nodes: pd.DataFrame) -> Figure:
    """Draw which guesses of the draft tree are accepted, by their depth and rank.

    Nodes of the same depth and of the same rank among their siblings are one circle, since a tree's
    shape may change from step to step. Its area grows with how many of them a step drafts, its
    colour with the share of steps that accept one of them: the circles of one depth sum to the
    share of steps that get so far. A line leads to the best-ranked circle one level up.

    Args:
        nodes: columns `depth` (from 1), `rank` (from 0), `drafted` and `accepted` (counts of
            nodes, drafted above 0).
    """
    depths, ranks = nodes["depth"].to_numpy(), nodes["rank"].to_numpy() + 1
    # Every step that drafts at all drafts a first child of the root.
    num_steps = nodes.loc[(nodes["depth"] == 1) & (nodes["rank"] == 0), "drafted"].sum()
    share = 100 * nodes["accepted"].to_numpy() / num_steps
    height = 1.1 + min(0.36 * max(3, ranks.max()), 6)
    figure, axes = figure_of(height)
    # Circles of neighbours must not touch: the width without labels holds all depths, the height all
    # ranks.
    widest = 72 * min(
        (WIDTH - 1.4) / (depths.max() + 1.2), (height - 0.9) / (ranks.max() + 0.2), 0.36
    )
    per_step = nodes["drafted"].to_numpy() / num_steps
    diameters = widest * (0.6 + 0.4 * np.sqrt(per_step / per_step.max()))
    edges = [((depth - 1, 1), (depth, rank)) for depth, rank in zip(depths, ranks, strict=True)]
    axes.add_collection(LineCollection(edges, colors="#bbbbbb", linewidths=0.8, zorder=1))
    axes.scatter([0], [1], s=widest**2, color="white", edgecolors="black", zorder=3)
    scale = PowerNorm(0.5, vmin=0, vmax=max(share.max(), 1))
    dots = axes.scatter(
        depths,
        ranks,
        s=diameters**2,
        c=share,
        cmap="Blues",
        norm=scale,
        edgecolors="#444444",
        zorder=3,
    )
    for depth, rank, percent, diameter in zip(depths, ranks, share, diameters, strict=True):
        if diameter >= LEAST_LABELLED:
            color = "white" if scale(percent) > 0.6 else "black"
            axes.annotate(_percent(percent), (depth, rank), **CENTRED, color=color)
    if widest >= LEAST_ROOT:
        axes.annotate("root", (0, 1), **CENTRED)
    axes.set(xlabel="depth in the tree (tokens after the root)", ylabel="rank among siblings")
    axes.set_ylim(ranks.max() + 0.6, 0.4)
    axes.set_xlim(-0.6, depths.max() + 0.6)
    axes.set_yticks(range(1, ranks.max() + 1, 1 + ranks.max() // 20))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(False)
    figure.colorbar(dots, ax=axes, label="accepted (% of steps)", aspect=30)
    return figure


def _percent(value: float) -> str:
    """Two characters at most, so that it fits into a circle: 44, 3, .4, 0."""
    if value >= 0.95 or value < 0.05:
        return f"{value:.0f}"
    return f"{value:.1f}".removeprefix("0")
