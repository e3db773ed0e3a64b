"""The tables of the study of the field."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from string import Formatter
from typing import NamedTuple

import numpy as np

from evaluation.reporting.tables import Cell, Table, figure_cell
from evaluation.reporting.titles import TASK_TITLES
from evaluation.scoring.intervals import Interval, RatioOfSums, paired_interval
from evaluation.scoring.per_question import task_of
from model.methods.registry import drafter_class
from scripts.replay.scores import TurnScore, figures

DEFAULTS = "defaults"
OURS = "hybrid"


class Entrant(NamedTuple):
    """A line of the field; {name} in its options is a file or folder that must be given."""

    title: str  # its name in tables
    options: str  # the method, its budget fixed, with its options
    # At n drafted nodes (as many as the method's tree has) further options: {n}, {tree} a template of the paper's
    # best n nodes, {lookahead} the options of lookahead.
    size: str
    as_published: str = ""  # at its paper's defaults further options
    is_published: bool = True  # whether a paper has it so; else it is this project's

    @property
    def at(self) -> str:
        """Method and options at n drafted nodes."""
        return f"{self.options} {self.size}".strip()

    @property
    def defaults(self) -> str:
        """Method and options of its paper."""
        return f"{self.options} {self.as_published}".strip()

    @property
    def method(self) -> str:
        return self.options.split()[0]

    @property
    def has_heads(self) -> bool:
        """Whether trained heads draft: it is not train-free."""
        return drafter_class(self.method).drafts_with() == "heads" or "--head " in self.options

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest tree that the method's options allow, such as 25 of EAGLE's fixed one."""
        options = fields(drafter_class(self.method).config_class)
        bounds = [item.metadata["most"] for item in options if item.name == "num_nodes"]
        return next(filter(None, bounds), sys.maxsize)

    @property
    def needs(self) -> list[str]:
        """Names of the files without which it cannot run."""
        return sorted(name for _, name, _, _ in Formatter().parse(self.options) if name)


class Run(NamedTuple):
    """An entrant at one size."""

    entrant: Entrant  # the line
    scores: list[TurnScore]  # of all turns, in their order
    num_bytes: int  # held by the drafter after the last turn

    @property
    def mat(self) -> float:
        """Mean accepted tokens a step."""
        return figures(self.scores).mat


Runs = dict[str, Run]  # by title, in the order of the tables


def ratios(columns: Mapping[str, Runs]) -> Table:
    """Return MAT and its ratio to that of the best other method."""
    rows = []
    for title in _titles(columns):
        row = [Cell(title)]
        for runs in columns.values():
            run = runs[title]
            ratio, interval = _ratio(run, _best_other(run, runs))
            found = figure_cell(ratio, unit="x", interval=interval)
            row.append(Cell(f"{run.mat:.2f}, {found.text}", run.mat))
        rows.append(row)
    caption = "MAT, and its ratio to the best other train-free method's, by drafted nodes"
    return Table(caption, ["drafter", *columns], rows)


def leads(columns: Mapping[str, Runs]) -> Table:
    """Return the ratio of our method to the best other one, published or not, by drafted nodes."""
    rows = []
    for name, runs in columns.items():
        ours = runs[OURS]
        published = {title: run for title, run in runs.items() if run.entrant.is_published}
        for among, others in (("published", published), ("all", runs)):
            other = _best_other(ours, others)
            ratio, interval = _ratio(ours, other)
            cells = [
                *(Cell(name), Cell(among), Cell(other.entrant.title)),
                *(figure_cell(ours.mat), figure_cell(other.mat)),
            ]
            rows.append([*cells, figure_cell(ratio, unit="x", interval=interval)])
    header = [
        *("drafted nodes", "among", "best other"),
        *(f"MAT of {OURS}", "MAT of the other", "ratio"),
    ]
    return Table(
        f"{OURS} against the best other train-free method", header, rows, num_text_columns=3
    )


def defaults(runs: Runs) -> Table:
    """Return the table of drafts at each paper's defaults."""
    rows = []
    for title, run in runs.items():
        drafted = [count - 1 for score in run.scores for count in score.num_nodes]
        values = (run.mat, sum(drafted) / len(drafted), float(max(drafted)))
        cells = [Cell(title), Cell(f"`{run.entrant.defaults}`"), *map(figure_cell, values)]
        rows.append([*cells, figure_cell(run.num_bytes / 2**20)])
    header = ["drafter", "options", "MAT", "drafted nodes a step", "most of a step", "MB held"]
    return Table("At the papers' defaults", header, rows, num_text_columns=2)


def memories(columns: Mapping[str, Runs]) -> Table:
    """Return the memory of every drafter after the run."""
    rows = [
        [
            Cell(title),
            *(figure_cell(runs[title].num_bytes / 2**20) for runs in columns.values()),
        ]
        for title in _titles(columns)
    ]
    caption = (
        "MB held by the drafter after the last turn, by drafted nodes (all that can be reached from it in Python, "
        "the last text's state included; what a C++ library allocates for one text is not seen)"
    )
    return Table(caption, ["drafter", *columns], rows)


def by_task(name: str, runs: Runs) -> Table:
    scores = next(iter(runs.values())).scores
    tasks = list(dict.fromkeys(task_of(score.turn.category) for score in scores))
    rows = []
    for title, run in runs.items():
        parts = [
            [score for score in run.scores if task_of(score.turn.category) == task]
            for task in tasks
        ]
        rows.append([Cell(title), *(figure_cell(figures(part).mat) for part in parts)])
    header = ["drafter", *(TASK_TITLES.get(task, task) for task in tasks)]
    size = "at the papers' defaults" if name == DEFAULTS else f"with {name} drafted nodes"
    return Table(f"MAT by task, {size}", header, rows)


def _titles(columns: Mapping[str, Runs]) -> list[str]:
    return list(next(iter(columns.values())))


def _best_other(run: Run, runs: Runs) -> Run:
    """Return the run of another train-free method that accepts most."""
    method = run.entrant.method
    return max(
        (
            other
            for other in runs.values()
            if other.entrant.method != method and not other.entrant.has_heads
        ),
        key=lambda other: other.mat,
    )


def _ratio(run: Run, base: Run) -> tuple[float, Interval]:
    """Return the ratio of two MATs and its interval over questions."""
    (tokens, steps), (base_tokens, base_steps) = _totals(run.scores), _totals(base.scores)
    ratio = RatioOfSums.of_rates(tokens, steps, base_tokens, base_steps)
    return ratio.value, paired_interval(ratio)


def _totals(scores: Sequence[TurnScore]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and steps of each question, each [Q], in the order of the questions."""
    tokens: dict[int | str, int] = {}
    steps: dict[int | str, int] = {}
    for score in scores:
        name = score.turn.question_id
        tokens[name] = tokens.get(name, 0) + sum(score.accept_lengths)
        steps[name] = steps.get(name, 0) + len(score.accept_lengths)
    return np.array(list(tokens.values())), np.array(list(steps.values()))
