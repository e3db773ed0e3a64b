"""Sampling is ancestral sampling: the same text as plain decoding from the same random numbers. Its
distribution is checked in tests/evaluation/checking/test_sampling_check.py.

Run: pytest tests/model/engine/test_rules.py
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from model.engine.loop import generate
from model.engine.rules import SamplingRule, sampling_processors
from model.methods import METHODS
from tests.model.decoded import drafter_for, random_ids, target_of
from tests.pairs import pairs

SETTINGS = [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.5, 12, 1.0)]


@pytest.mark.parametrize(("method", "setting"), pairs(METHODS, SETTINGS, each=2))
def test_one_generator_gives_one_text_whatever_the_method(
    method: str, setting: tuple[float, int, float]
) -> None:
    texts = texts_of(method, setting)
    assert texts == plain_texts(setting)
    assert len({tuple(text) for text in texts}) == 3, "three draws gave the same text"


@cache
def plain_texts(setting: tuple[float, int, float]) -> list[list[int]]:
    """Return those of plain decoding."""
    return texts_of("vanilla", setting)


def texts_of(method: str, setting: tuple[float, int, float]) -> list[list[int]]:
    """Return three texts, each with the generator where the one before left it."""
    target = target_of("Llama, grouped heads")
    rule = SamplingRule(sampling_processors(*setting), torch.Generator().manual_seed(11))
    drafter = drafter_for(method, target)  # the loop of recycling goes on unseen
    answers = [
        generate(target, drafter, random_ids(9), max_new_tokens=30, eos_ids=[4], rule=rule)
        for _ in range(3)
    ]
    return [answer.token_ids for answer in answers]


def test_sampling_processors_are_the_warpers_asked_for() -> None:
    names = [type(processor).__name__ for processor in sampling_processors(0.7, 5, 0.9)]
    assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]
    assert sampling_processors(1.0, 0, 1.0) == []
