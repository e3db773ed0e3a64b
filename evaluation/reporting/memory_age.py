"""Acceptance over the age of a method's memory: mean accepted tokens by the questions' place in the run.

What a method keeps from earlier questions helps it with later ones, so a figure over all questions is one over
memories of all ages. Made from answer rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import pandas as pd

from evaluation.reporting.tables import Cell, Table, figure_cell
from evaluation.reporting.titles import short_titles
from evaluation.scoring.figures import by_task, quotient
from evaluation.scoring.groups import AnswerFile, Group
from evaluation.scoring.intervals import (
    LEAST_QUESTIONS,
    RatioOfSums,
    joint_confidence,
    paired_interval,
)
from evaluation.scoring.per_question import OVERALL

CAPTION = (
    "Mean accepted tokens over the age of the memory, of the methods that keep one across questions"
)
# The parts of a run, by how many of its questions came before.
PARTS = ("First quarter", "Second", "Third", "Last")
FIRST, LAST = 0, len(PARTS) - 1


def memory_table(group: Group) -> Table:
    """Return a line for each method with memory; none for fewer than `LEAST_QUESTIONS` questions a quarter."""
    confidence = joint_confidence(group.num_compared)
    rows = []
    for name, files in _with_memory(group):
        work = _work(files)
        if work is None:
            continue
        growth = growth_of(work)
        mats = [
            quotient(work["accepted"][part].sum(), work["steps"][part].sum())
            for part in range(len(PARTS))
        ]
        interval = paired_interval(growth, confidence)
        last = figure_cell(growth.value, unit="x", interval=interval)
        rows.append([Cell(name), *map(figure_cell, mats), last])
    return Table(CAPTION, ["Models", *PARTS, "Last over first"], rows)


def growth_of(work: pd.DataFrame) -> RatioOfSums:
    """Return the last part's mean accepted tokens over the first's; `work` is that of `_work`."""
    accepted, steps = work["accepted"], work["steps"]
    return RatioOfSums(
        (accepted[LAST].to_numpy(), steps[FIRST].to_numpy()),
        (steps[LAST].to_numpy(), accepted[FIRST].to_numpy()),
    )


def order_notes(group: Group) -> Iterator[str]:
    """Yield a line if the tasks follow each other in files of methods with memory."""
    names = [name for name, files in _with_memory(group) if any(map(_is_in_blocks, files))]
    if names:
        yield (
            "The questions of each task were asked one after the other, not shuffled: a task's figures are also "
            f"those of the age of the memory of {', '.join(names)}"
        )


def _with_memory(group: Group) -> Iterator[tuple[str, list[AnswerFile]]]:
    """Yield the methods that keep a memory, by their titles, with their answers to the group's own benchmark."""
    titles = short_titles(group)
    for row in group.rows:
        files = row.entry.runs.get(group.conditions[-1], [])
        if any(file.record.keeps_memory for file in files):
            yield titles[row.entry.label], files


def _is_in_blocks(file: AnswerFile) -> bool:
    if file.options.get("shuffle") is not None:  # few questions may lie so by chance
        return False
    tasks = list(file.frame["task"])
    return 1 < len(set(tasks)) == sum(1 for _ in groupby(tasks))


def _work(files: Sequence[AnswerFile]) -> pd.DataFrame | None:
    """Return columns `accepted` and `steps` with a column for each of `PARTS`, a line a question; None if too few.

    Of the rows without a defect that overall figures count, all runs together.
    """
    placed = pd.concat([_placed(file) for file in files])
    if placed.isna().any(axis=None):
        return None
    num_questions = placed[placed["steps"] > 0].groupby("part")["question"].nunique()
    if any(num_questions.get(part, 0) < LEAST_QUESTIONS for part in range(len(PARTS))):
        return None
    return placed.pivot_table(
        index="question",
        columns="part",
        values=["accepted", "steps"],
        aggfunc="sum",
        fill_value=0.0,
    )


def _placed(file: AnswerFile) -> pd.DataFrame:
    """Return the question, part of the run and work of each row that counts."""
    frame = by_task(file.frame)[OVERALL]
    # Of shards and workers each has a memory of its own, and says how many questions it had seen.
    seen = [row.values.get("questions_before") for row in file.rows]
    are_known = all(isinstance(one, int) and 0 <= one < len(seen) for one in seen)
    places = pd.Series(seen if are_known else range(len(seen)), index=file.frame.index)
    parts = len(PARTS) * places // (places.max() + 1)
    counted = frame[frame["is_sound"]]
    columns = {"question": counted["question_id"].map(repr), "part": parts.loc[counted.index]}
    return counted[["accepted", "steps"]].assign(**columns)
