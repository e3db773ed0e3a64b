"""Figures of a server as its clients see it: waiting for the first token, between tokens, acceptance.

Acceptance is tokens a step, every step counted, steps without a draft too (docs/acceptance.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evaluation.answers.row import AnswerRow

QUANTILE = 0.9


class ServingFigures(NamedTuple):
    """Over all turns of rows that did not fail; NaN where nothing is known."""

    num_requests: int
    tokens_per_second: float  # of the server, whatever the number of requests at a time
    first_token: float  # median seconds to the first token
    first_token_slow: float  # 90th percentile of the same
    between_tokens: float  # median over turns of the mean seconds between tokens
    between_tokens_slow: float  # 90th percentile of the same
    tokens_per_step: float
    cached_share: float  # of prompt tokens, from the server's prefix cache


def serving_figures(rows: Sequence[AnswerRow]) -> ServingFigures:
    """Return the figures of a server's rows."""
    choices = [choice for row in rows if not row.is_failed for choice in row.choices]
    turns = [
        turn
        for choice in choices
        for turn in zip(
            choice.time_to_first_token, choice.wall_time, choice.new_tokens, strict=False
        )
    ]
    waits = [first for first, _, _ in turns]
    gaps = [(wall - first) / (count - 1) for first, wall, count in turns if count > 1]
    tokens = sum(sum(choice.new_tokens) for choice in choices)
    steps = sum(choice.num_steps for choice in choices)
    prompt = sum(sum(choice.prompt_tokens) for choice in choices)
    return ServingFigures(
        len(turns),
        _quotient(tokens, sum(choice.seconds for choice in choices)),
        _quantile(waits, 0.5),
        _quantile(waits, QUANTILE),
        _quantile(gaps, 0.5),
        _quantile(gaps, QUANTILE),
        _quotient(tokens, steps),
        _quotient(sum(sum(choice.cached_tokens) for choice in choices), prompt),
    )


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else math.nan


def _quotient(value: float, divisor: float) -> float:
    return value / divisor if divisor > 0 else math.nan
