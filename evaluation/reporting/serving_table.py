"""The table of servers as their clients see them: waiting for the first token, between tokens, acceptance.

Acceptance is tokens a step, every step counted, steps without a draft too (docs/acceptance.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from evaluation.answers.row import AnswerRow
from evaluation.reporting.tables import Cell, Table, figure_cell

HEADER = ["Server", "Requests", "Tokens/s", "First token, ms", "90%", "Between tokens, ms", "90% "]
HEADER += ["Tokens a step", "Prompt cached %"]
CAPTION = "What clients of servers waited: medians and 90th percentiles over turns"
CACHED = (
    "Prompts from a prefix cache cost less than those before them: start the server without one"
)
QUANTILES = (0.5, 0.9)


def serving_table(rows: Mapping[str, Sequence[AnswerRow]]) -> Table:
    """Return a line for each server's rows, by its name: over all turns of rows that did not fail."""
    lines, is_cached = [], False
    for name, answered in rows.items():
        choices = [choice for row in answered if not row.is_failed for choice in row.choices]
        turns = [
            turn
            for choice in choices
            for turn in zip(
                choice.time_to_first_token, choice.wall_time, choice.new_tokens, strict=False
            )
        ]
        waits = [first for first, _, _ in turns]
        # Of each turn the mean seconds between tokens.
        gaps = [(wall - first) / (count - 1) for first, wall, count in turns if count > 1]
        tokens = sum(sum(choice.new_tokens) for choice in choices)
        prompt = sum(sum(choice.prompt_tokens) for choice in choices)
        cached = _quotient(sum(sum(choice.cached_tokens) for choice in choices), prompt)
        is_cached = is_cached or cached > 0
        figures = [
            _quotient(tokens, sum(choice.seconds for choice in choices)),
            *(1000 * seconds for seconds in (*_quantiles(waits), *_quantiles(gaps))),
            _quotient(tokens, sum(choice.num_steps for choice in choices)),
            100 * cached,
        ]
        lines.append([Cell(name), Cell(str(len(turns)), len(turns)), *map(figure_cell, figures)])
    return Table(CAPTION, HEADER, lines, notes=[CACHED] if is_cached else [])


def _quantiles(values: Sequence[float]) -> list[float]:
    return [float(np.quantile(values, share)) if values else math.nan for share in QUANTILES]


def _quotient(value: float, divisor: float) -> float:
    return value / divisor if divisor > 0 else math.nan
