"""How a method is asked for a turn, and the figures of its answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from evaluation.answers.row import Turn
from evaluation.answers.step_figures import step_counts
from evaluation.inference.config import DecodingOptions
from model.engine.rules import GreedyRule, SamplingRule, TokenRule, sampling_processors
from model.engine.step import StepRecord


def token_rule(sampling: DecodingOptions, generator: torch.Generator) -> TokenRule | None:
    """Return how each token is chosen; None: it is the likeliest."""
    processors: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if not sampling.temperature:
        return GreedyRule(processors) if processors else None
    processors += sampling_processors(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    )
    return SamplingRule(processors, generator)


def turn_of(
    steps: Sequence[StepRecord],
    num_prompt: int,
    wall_time: float,
    cpu_time: float,
    share_time: float | None = None,
) -> Turn:
    """Return the answer that these steps make.

    Args:
        steps: of one turn, all of them.
        num_prompt: tokens of its prompt.
        wall_time: seconds that a user waited.
        cpu_time: CPU seconds of the process.
        share_time: seconds spent on this turn; None: all that a user waited.
    """
    prefill_time = sum(step.prefill_ns for step in steps) / 1e9
    details = {
        "prompt_tokens": num_prompt,
        "prefill_time": prefill_time,
        "decode_time": (wall_time if share_time is None else share_time) - prefill_time,
        "cpu_time": cpu_time,
        "stop_reasons": steps[-1].stop_reason,
        **step_counts(steps),
    }
    if share_time is not None:
        details["share_time"] = share_time
    token_ids = [token for step in steps for token in step.tokens]
    return Turn(token_ids, [len(step.tokens) for step in steps], wall_time, details)
