"""Pictures of groups of answers (`scoring/comparable.py`).

For each group: speed-up per task with intervals, how many tokens a step brings, which nodes of the draft tree are
accepted, and how acceptance grows with the questions seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from evaluation.answers.step_figures import node_counts
from evaluation.reporting import charts
from evaluation.reporting.charts import Picture
from evaluation.reporting.notes import intervals_text
from evaluation.reporting.titles import entry_titles
from evaluation.scoring.figures import OVERALL, by_task
from evaluation.scoring.groups import AnswerFile, Group


def group_pictures(groups: Sequence[Group]) -> list[list[Picture]]:
    """Draw every group; with several groups a picture's name says which one it is of."""
    prefixes = [
        f"group-{number}-" if len(groups) > 1 else "" for number in range(1, len(groups) + 1)
    ]
    return [
        [picture._replace(name=prefix + picture.name) for picture in _pictures_of(group)]
        for prefix, group in zip(prefixes, groups, strict=True)
    ]


def _pictures_of(group: Group) -> Iterator[Picture]:
    names = {label: title.long for label, title in entry_titles(group).items()}
    baseline = names[group.baseline.label]
    look = charts.looks(list(names.values()))
    speedups = _speedups(group, names)
    if (speedups["method"] != baseline).any():
        floor = group.floor_interval("speedup")
        band = " The grey band is how far two runs of one method differ overall."
        yield Picture(
            "speedup",
            "Speed-up by task",
            f"Tokens per second relative to {baseline}. Bars: {intervals_text(group)}."
            + band * floor.is_known,
            charts.speedup_chart(speedups, baseline, look, floor if floor.is_known else None),
        )
    # Overall figures leave out MBPP beside Spec-Bench.
    files = {row.entry.label: row.entry.runs.get(group.conditions[-1], []) for row in group.rows}
    lengths = {
        label: [length for file in runs for length in _accept_lengths(file)]
        for label, runs in files.items()
    }
    drafting = [row.entry for row in group.rows if max(lengths[row.entry.label], default=1) > 1]
    if not drafting:
        return
    yield Picture(
        "accept-lengths",
        "How many tokens a step brings",
        "Share of a method's steps by the number of tokens they emit; one is what plain decoding "
        "does. A method that only sometimes guesses has most steps at one.",
        charts.accept_length_chart(
            {names[entry.label]: lengths[entry.label] for entry in drafting}, look
        ),
    )
    for place, entry in enumerate(drafting, start=1):
        nodes = node_counts([row for file in entry.files for row in file.rows])
        if not nodes.empty:
            yield Picture(
                f"tree-{place}",
                f"Which guesses are accepted: {names[entry.label]}",
                "Share of the steps with a draft that accept a guess of this depth and of this rank "
                "among its siblings; a depth's shares sum to the share of steps that get so far. A "
                "larger circle stands for more guesses a step.",
                charts.tree_chart(nodes),
            )
    yield Picture(
        "warm-up",
        "Acceptance against questions seen",
        "Mean accepted tokens over all steps up to a question, in the order of answering. Dashed "
        "methods forget between questions.",
        charts.warm_up_chart(
            {names[entry.label]: _mat_so_far(files[entry.label]) for entry in drafting},
            [names[entry.label] for entry in drafting if entry.options.get("start") == "cold"],
            _task_order([file for entry in drafting for file in files[entry.label]]),
            look,
        ),
    )


def _speedups(group: Group, names: Mapping[str, str]) -> pd.DataFrame:
    """Columns method, task, speedup, low, high: tasks in order, of each the best method first."""
    lines = [
        (
            names[row.entry.label],
            task,
            row.figures.figure(task, "speedup"),
            *row.figures.interval(task, "speedup"),
        )
        for task in group.tasks
        for row in group.rows
    ]
    frame = pd.DataFrame(lines, columns=["method", "task", "speedup", "low", "high"])
    return frame.dropna(subset="speedup")


def _accept_lengths(file: AnswerFile) -> list[int]:
    """Return the tokens of every step that overall figures count, of the rows without a defect."""
    overall = by_task(file.frame)[OVERALL]
    places = overall.index[overall["is_sound"]]
    choices = [choice for place in places for choice in file.rows[place].choices]
    # Other writers may count steps without tokens.
    return [int(it) for choice in choices for it in choice.accept_lengths if it >= 1]


def _mat_so_far(files: Sequence[AnswerFile]) -> list[float]:
    """Return the MAT of all steps up to each question, over all runs; rows with a defect have none."""
    frames = [file.frame for file in files]
    work = [frame[["accepted", "steps"]].where(frame["is_sound"], 0) for frame in frames]
    total = pd.concat(work).groupby(level=0).sum().cumsum()
    return list(total["accepted"] / total["steps"])


def _task_order(files: Sequence[AnswerFile]) -> list[str]:
    """Return each question's task in the order of answering, empty if the files differ in it."""
    orders = {tuple(file.frame["task"]) for file in files}
    return list(orders.pop()) if len(orders) == 1 else []
