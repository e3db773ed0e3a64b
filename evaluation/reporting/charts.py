"""The charts of a report, each drawn from plain figures; `pictures.py` says which ones and from what.

Axes carry the units of times and shares. `chart_style.py` has the common style.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from evaluation.reporting.chart_style import (
    GREY,
    STYLE,
    WIDTH,
    Look,
    draw_legend,
    figure_of,
    legend_label,
    looks,
    marks,
    wrapped,
)
from evaluation.reporting.titles import task_title

LONGEST_BAR = 15  # tokens; longer steps share the last bar


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
def step_cost_chart(
    costs: pd.DataFrame, accepted: Mapping[str, float], nodes: Mapping[str, float]
) -> Figure:
    """Draw what a step over N nodes costs on a device, in steps of one node: the break-even line.

    A draft of N nodes pays where the tokens a step brings (MAT) lie above the line.

    Args:
        costs: columns `num_nodes`, `context` (cached tokens) and `milliseconds` of one forward
            pass; every context has a row of one node.
        accepted: MAT of each method that drafts, measured on this device.
        nodes: mean nodes of a step, root included, of those methods for which it is known; they are
            marks at (nodes, MAT), the others lines at their MAT.
    """
    look = looks(list(accepted))
    figure, axes = figure_of(3.3)
    greys = np.linspace(0.2, 0.65, costs["context"].nunique())
    for grey, (context, rows) in zip(greys, costs.groupby("context"), strict=True):
        rows = rows.sort_values("num_nodes")
        one = float(rows.loc[rows["num_nodes"] == 1, "milliseconds"].iloc[0])
        axes.plot(
            rows["num_nodes"],
            rows["milliseconds"] / one,
            color=str(grey),
            linewidth=1.6,
            marker=".",
            label=f"break-even after {context} tokens (one node: {one:.2f} ms)",
        )
    for method, tokens in sorted(accepted.items(), key=lambda item: -item[1]):
        if method in nodes:
            label = legend_label(f"{method}: {nodes[method]:.1f} nodes, MAT {tokens:.2f}")
            axes.plot([nodes[method]], [tokens], **marks(look[method], 8), label=label)
        else:
            label = legend_label(f"{method}: MAT {tokens:.2f}")
            axes.axhline(
                tokens, color=look[method].color, linewidth=1.2, linestyle="--", label=label
            )
    axes.set_xscale("log", base=2)
    ticks = sorted(set(costs["num_nodes"]))
    # 64 and 81 would touch on a logarithmic axis.
    shown = [tick for tick in ticks if all(not tick < other < 1.4 * tick for other in ticks)]
    axes.set_xticks(shown, [str(tick) for tick in shown])
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.9, axes.get_ylim()[1])
    levels = [step * 2**power for power in range(12) for step in (1, 1.5)]
    levels = [level for level in levels if level <= axes.get_ylim()[1]]
    axes.set_yticks(levels, [f"{level:g}" for level in levels])
    axes.minorticks_off()
    axes.set_xlabel("nodes of a step, root included")
    axes.set_ylabel("cost of a step (steps of one node)\n= MAT at which it breaks even")
    draw_legend(figure, axes)
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
