"""The charts of a report, each drawn from plain figures; `pictures.py` says which ones and from what.

One style, one look for each method, SVG and PNG. Colours are Okabe and Ito's, which colour-blind readers can tell
apart; every method has a marker of its own besides. Axes carry the units of times and shares. Text in a picture is
shown as it stands: a method named `$x$` is not set as mathematics.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from io import BytesIO, StringIO
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.collections import LineCollection
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from evaluation.reporting.titles import task_title

# Okabe and Ito's set, with grey instead of its yellow, which is too pale on white.
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#777777", "#000000"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p")
GREY = "#666666"
WIDTH = 4.6  # inches; narrow, so that a picture shrunk to a phone's width is still legible
STYLE: Any = {  # matplotlib's own type lists every setting's name
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    # Text stays text: it can be read aloud, searched and copied, and needs no glyph outlines.
    "svg.fonttype": "none",
    "text.parse_math": False,
}
LONGEST_BAR = 15  # tokens; longer steps share the last bar
# Of the draft tree's picture.
LEAST_LABELLED = 14  # points; in smaller circles the colour alone tells the share
LEAST_ROOT = 18  # the word is wider than two digits
CENTRED: Any = {"ha": "center", "va": "center", "fontsize": 6.5, "zorder": 4}


class Look(NamedTuple):
    """How a method is drawn, the same in every picture of a report."""

    color: str
    marker: str


class Picture(NamedTuple):
    """A drawn figure."""

    name: str  # of its files, unique in a report
    title: str
    caption: str  # how to read it
    figure: Figure


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """Give every method a colour and a marker, by name, so that a change of rank changes neither."""
    return {
        label: Look(COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)])
        for place, label in enumerate(sorted(set(labels)))
    }


def figure_of(height: float) -> tuple[Figure, Any]:
    """Return an empty figure of the common width and of a height in inches, and its axes."""
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.subplots()


def marks(look: Look, size: float = 5) -> dict[str, Any]:
    """Return options of a plot that draws a method's marks and no line; size in points."""
    return {"color": look.color, "marker": look.marker, "markersize": size, "linestyle": "none"}


def draw_legend(figure: Figure, axes: Any) -> None:
    """Draw a legend below the axes and enlarge the figure for it."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) <= 24 else 1
    texts = [wrapped(label, 24 if columns == 2 else 52) for label in labels]
    num_lines = sum(1 + label.count("\n") for label in texts) / columns
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(num_lines))
    figure.legend(handles, texts, loc="outside lower center", ncols=columns)


def legend_label(name: str) -> str:
    """Return a name as matplotlib's legend shows it; it leaves out those that begin with an underscore."""
    return f"\u200b{name}" if name.startswith("_") else name


def wrapped(text: str, width: int, max_lines: int = 3) -> str:
    """Return a text in lines of at most `width` characters; what is too long ends in dots."""
    return textwrap.fill(text, width, max_lines=max_lines, placeholder=" \u2026") or text


def svg_text(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element for a page, without the XML head.

    `name` is unique in the page; every id in the element begins with it.
    """
    out = StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()[out.getvalue().index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', svg)
    return svg.replace("url(#", f"url(#{name}-")


def png_bytes(figure: Figure) -> bytes:
    out = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format="png", dpi=200)
    return out.getvalue()


@matplotlib.rc_context(STYLE)
def speedup_chart(
    frame: pd.DataFrame,
    baseline: str,
    look: Mapping[str, Look],
    floor: tuple[float, float] | None = None,
) -> Figure:
    """Draw speed-ups with their intervals, a band for each task and a mark for each method.

    Args:
        frame: columns `method`, `task`, `speedup`, `low`, `high` (ratios; the last two NaN
            where there is no interval); tasks from top to bottom and methods in order of occurrence.
        baseline: not drawn, since it is the line at 1.
        look: how each method is drawn.
        floor: overall ratios within which two runs of one method differ, drawn as a band.
    """
    frame = frame[frame["method"] != baseline]
    tasks, methods = list(dict.fromkeys(frame["task"])), list(dict.fromkeys(frame["method"]))
    band = len(methods) + 1.2  # one line a method, and room between bands
    figure, axes = figure_of(0.75 + 0.125 * band * len(tasks))
    for place in range(0, len(tasks), 2):
        axes.axhspan((place - 0.5) * band, (place + 0.5) * band, color="#f4f4f4", zorder=0)
    for line, method in enumerate(methods):
        rows = frame[frame["method"] == method]
        offset = line - (len(methods) - 1) / 2
        heights = [tasks.index(task) * band + offset for task in rows["task"]]
        axes.plot(rows["speedup"], heights, **marks(look[method]), label=legend_label(method))
        # Drawn apart: an interval over paired questions may exclude the mean over all rows.
        axes.errorbar(
            (rows["low"] + rows["high"]) / 2,
            heights,
            xerr=(rows["high"] - rows["low"]) / 2,
            ecolor=look[method].color,
            linestyle="none",
            elinewidth=1.2,
            capsize=2,
        )
    if floor is not None:
        label = "two runs of one method differ"
        axes.axvspan(*floor, color=GREY, alpha=0.2, linewidth=0, label=label)
    axes.axvline(
        1, color=GREY, linewidth=1, linestyle="--", label=legend_label(f"{baseline} (baseline)")
    )
    axes.set_yticks(
        [place * band for place in range(len(tasks))],
        [wrapped(task_title(task), 18) for task in tasks],
    )
    axes.set_ylim((len(tasks) - 0.5) * band, -0.5 * band)
    axes.grid(False, axis="y")
    axes.set_xlabel(f"speed-up over {baseline} (x)")
    draw_legend(figure, axes)
    return figure


@matplotlib.rc_context(STYLE)
def accept_length_chart(lengths: Mapping[str, Sequence[int]], look: Mapping[str, Look]) -> Figure:
    """Draw how many tokens a step brings, as a share of each method's steps.

    `lengths` are the tokens of every step, bonus token included, by method, from top to bottom.
    """
    titles = [
        wrapped(f"{method}: mean {np.mean(steps):.2f}", 50) for method, steps in lengths.items()
    ]
    num_lines = sum(1 + title.count("\n") for title in titles)
    figure = Figure(figsize=(WIDTH, 0.6 + 0.78 * len(titles) + 0.17 * num_lines))
    grid = figure.subplots(len(lengths), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    longest = max(map(max, lengths.values()))
    last = min(longest, LONGEST_BAR + 1)
    for axes, title, (method, steps) in zip(grid, titles, lengths.items(), strict=True):
        counts = np.bincount(np.minimum(steps, last), minlength=last + 1)[1:]
        axes.bar(range(1, last + 1), 100 * counts / len(steps), color=look[method].color, width=0.8)
        axes.axvline(float(np.mean(steps)), color="black", linewidth=1, linestyle=":")
        axes.set_title(title, loc="left", fontsize=9)
        axes.grid(False, axis="x")
    names = [str(length) for length in range(1, last + 1)]
    if longest > LONGEST_BAR:
        names[-1] = f"{last}+"
    grid[-1].set_xticks(range(1, last + 1), names)
    grid[-1].set_xlabel("tokens of a step, bonus token included (dotted: mean)")
    figure.supylabel("share of steps (%)", fontsize=9)
    return figure


@matplotlib.rc_context(STYLE)
def warm_up_chart(
    curves: Mapping[str, Sequence[float]],
    cold: Sequence[str],
    tasks: Sequence[str],
    look: Mapping[str, Look],
) -> Figure:
    """Draw the mean accepted tokens of all steps so far against the questions answered so far.

    Args:
        curves: MAT after question 1, 2, ... for each method; NaN where none counts yet.
        cold: methods that forget between questions, drawn dashed.
        tasks: task of each question, in order; where contiguous, its end is marked.
        look: how each method is drawn.
    """
    figure, axes = figure_of(3.1)
    for method, values in curves.items():
        line = {"linestyle": "--" if method in cold else "-", "linewidth": 1.4}
        style = marks(look[method], 4) | line | {"markevery": max(1, len(values) // 8)}
        asked = np.arange(1, len(values) + 1)
        axes.plot(asked, values, **style, label=legend_label(method))
    _mark_tasks(axes, tasks)
    axes.set_xlabel("questions seen")
    axes.set_ylabel("mean accepted tokens so far")
    axes.set_xlim(left=0)
    draw_legend(figure, axes)
    return figure


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


def _mark_tasks(axes: Any, tasks: Sequence[str]) -> None:
    """Mark the end of each task, with its name above, if every task is one block of questions."""
    begins = [place for place, task in enumerate(tasks) if place == 0 or tasks[place - 1] != task]
    if len(begins) != len(set(tasks)) or not 1 < len(begins) <= 8:
        return
    for begin, end in zip(begins, [*begins[1:], len(tasks)], strict=True):
        axes.axvline(end, color="#bbbbbb", linewidth=0.8, linestyle=":")
        if end - begin < 0.05 * len(tasks):
            continue  # its name would run into the next one's
        axes.annotate(
            wrapped(task_title(tasks[begin]), 20, max_lines=1),
            ((begin + end) / 2, 1),
            xycoords=("data", "axes fraction"),
            ha="left",
            va="bottom",
            rotation=45,
            fontsize=7.5,
        )


def _percent(value: float) -> str:
    """Two characters at most, so that it fits into a circle: 44, 3, .4, 0."""
    if value >= 0.95 or value < 0.05:
        return f"{value:.0f}"
    return f"{value:.1f}".removeprefix("0")
