"""The map of measured batches as a page and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from evaluation.reporting.chart_style import COLORS, MARKERS, STYLE
from evaluation.reporting.tables import markdown_table
from scripts.batch_map.measure import ENTRANTS, Run

BASE, *DRAFTING = ENTRANTS


def ratios(runs: Sequence[Run], method: str, context: int, batch_size: int) -> list[float]:
    """Return a method's tokens a second relative to the plain batch, round by round."""

    def rates(name: str) -> dict[int, float]:
        return {
            run.round: run.tokens / run.seconds
            for run in runs
            if (run.method, run.context, run.batch_size) == (name, context, batch_size)
        }

    own, base = rates(method), rates(BASE)
    return [own[number] / base[number] for number in own]


def border(points: Sequence[tuple[int, float]]) -> str:
    """Return where a rising batch size brings the ratio down to 1: "8 to 16", "above 32" or "below 2"."""
    paying = [size for size, ratio in points if ratio > 1]
    if not paying:
        return f"below {points[0][0]}"
    larger = [size for size, _ in points if size > max(paying)]
    return f"{max(paying)} to {larger[0]}" if larger else f"above {max(paying)}"


def page(found: Sequence[Mapping[str, Any]], picture: str) -> str:
    """Return the measured files as Markdown, with the picture beside the page."""
    parts = [
        "# Where drafts pay in batches",
        "Tokens a second of each method relative to the plain batch (vanilla) **of the same size**: the median of "
        "interleaved repetitions, and their range. A prompt is a page of this project's documentation and then a "
        "question; it is read once, and steps alone are measured. Memory comes from other texts; all texts of a "
        "batch share it. In its first steps an answer has little of its own to repeat: further on, drafts are "
        "accepted more often, and pay in larger batches.",
        f"![Tokens a second relative to the plain batch]({picture})",
        *(_section(one) for one in found),
    ]
    return "\n\n".join(parts) + "\n"


def _section(one: Mapping[str, Any]) -> str:
    runs: list[Run] = one["runs"]
    contexts = sorted({run.context for run in runs})
    command = "python -m scripts.batch_map " + " ".join(one["argv"])
    lines = [
        f"## {one['model_path']}, {one['dtype']}",
        f"The first {one['steps']} steps of each answer. `{command}`, commit {one['git_commit'] or 'unknown'}, "
        f"{one['device']}, {one['threads']} thread(s), torch {one['versions']['torch']}, transformers "
        f"{one['versions']['transformers']}.",
    ]
    borders = []
    for context in contexts:
        sizes = sorted({run.batch_size for run in runs if run.context == context})
        rows = [[BASE, *(_plain(runs, context, size) for size in sizes)]]
        for method in DRAFTING:
            rows.append([method, *(_cell(runs, method, context, size) for size in sizes)])
            measured = [
                (size, statistics.median(ratios(runs, method, context, size))) for size in sizes
            ]
            predicted = [(size, _predicted(runs, method, context, size)) for size in sizes]
            borders.append([method, str(context), border(measured), border(predicted)])
        header = [f"{context} tokens", *(f"B = {size}" for size in sizes)]
        lines.append(markdown_table(header, rows, num_text_columns=1))
    lines += [
        "Vanilla: tokens a second, and x of one text. Others: x of vanilla at the same size, range of the "
        "repetitions, tokens a step of a text, rows a text. The largest size at which drafts pay, and the next:",
        markdown_table(
            ["method", "context", "measured", "predicted by step costs"],
            borders,
            num_text_columns=1,
        ),
    ]
    return "\n\n".join(lines)


def _of(runs: Sequence[Run], method: str, context: int, size: int) -> list[Run]:
    return [
        run for run in runs if (run.method, run.context, run.batch_size) == (method, context, size)
    ]


def _plain(runs: Sequence[Run], context: int, size: int) -> str:
    rate = statistics.median(run.tokens / run.seconds for run in _of(runs, BASE, context, size))
    smallest = min(run.batch_size for run in runs if run.context == context)
    alone = statistics.median(
        run.tokens / run.seconds for run in _of(runs, BASE, context, smallest)
    )
    return f"{rate:.0f}, {rate / alone:.1f}x"


def _cell(runs: Sequence[Run], method: str, context: int, size: int) -> str:
    found, of_method = ratios(runs, method, context, size), _of(runs, method, context, size)
    tokens = statistics.fmean(run.tokens / run.steps / size for run in of_method)
    rows = statistics.fmean(run.rows / run.steps / size for run in of_method)
    return f"{statistics.median(found):.2f}x ({min(found):.2f} to {max(found):.2f}); {tokens:.2f}; {rows:.1f}"


def _predicted(runs: Sequence[Run], method: str, context: int, size: int) -> float:
    return statistics.fmean(run.predicted for run in _of(runs, method, context, size))


def chart(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a panel for each file and context: x of the plain batch by batch size, measured and predicted."""
    contexts = sorted({run.context for one in found for run in one["runs"]})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.0 * len(contexts), 2.3 * len(found) + 0.6))
        panels = figure.subplots(len(found), len(contexts), sharex=True, sharey=True, squeeze=False)
        for one, of_file in zip(found, panels, strict=True):
            for context, axes in zip(contexts, of_file, strict=True):
                _draw_panel(axes, one["runs"], context)
                axes.set_title(f"{one['model_path']}, {one['dtype']}, {context} tokens", fontsize=8)
        for axes in panels[-1]:  # all panels have one axis
            axes.set_xticks(sorted({run.batch_size for one in found for run in one["runs"]}))
            axes.set_xlabel("texts in the batch")
        for of_file in panels:
            of_file[0].set_ylabel("x of the plain batch")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(DRAFTING), fontsize=8)
    return figure


def _draw_panel(axes: Any, runs: Sequence[Run], context: int) -> None:
    sizes = sorted({run.batch_size for run in runs if run.context == context})
    axes.axhline(1.0, color="#000000", linewidth=0.8)
    for index, method in enumerate(DRAFTING):
        middles = [statistics.median(ratios(runs, method, context, size)) for size in sizes]
        predicted = [_predicted(runs, method, context, size) for size in sizes]
        color = COLORS[index]
        axes.plot(sizes, middles, color=color, marker=MARKERS[index], markersize=4, label=method)
        axes.plot(sizes, predicted, color=color, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
