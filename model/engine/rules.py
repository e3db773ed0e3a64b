"""Settings of sampling, as what chooses each token (`model.engine.verification`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from transformers import (
    LogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .target import TargetModel
from .verification import GreedyRule, Processor, SamplingRule, TokenRule

# They count their calls, and in float32 a near-tie asks twice about one token.
STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


def token_rule(
    target: TargetModel,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    processors: Sequence[Processor],
) -> TokenRule | None:
    """Return how tokens are chosen; None for the plain argmax."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: got {temperature}; allowed: 0 (greedy) or more")
    if top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"top_k, top_p: got {top_k}, {top_p}; allowed: 0 or more, above 0 to 1")
    if temperature > 0:
        generator = None
        if seed is not None:
            generator = torch.Generator(target.device).manual_seed(seed)
        return SamplingRule(
            [*processors, *sampling_processors(temperature, top_k, top_p)], generator
        )
    if top_k or top_p < 1:
        raise ValueError(
            "top_k, top_p: need sampling; give a temperature above 0, or leave them out"
        )
    refuse_stateful(processors)
    return GreedyRule(processors) if processors else None


def sampling_processors(temperature: float, top_k: int, top_p: float) -> list[LogitsProcessor]:
    """Return transformers' warpers for these settings, in the order of its own sampling.

    Args:
        temperature: above 0.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
    """
    processors: list[LogitsProcessor] = []
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    return processors


def refuse_stateful(processors: Iterable[object]) -> None:
    """Raise ValueError for transformers' processors that greedy decoding cannot ask twice."""
    if any(isinstance(one, STATEFUL) for one in processors):
        raise ValueError(
            "guidance_scale, watermarks with state: got them with greedy decoding; allowed: with "
            "do_sample=True, or a temperature above 0"
        )
