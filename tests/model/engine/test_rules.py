"""Sampling is ancestral sampling: the same text as plain decoding from the same random numbers. Its
distribution is checked in tests/evaluation/checking/test_sampling_check.py.

Run: pytest tests/model/engine/test_rules.py
"""

from __future__ import annotations

import pytest
import torch

from model.engine.loop import generate
from model.engine.rules import SamplingRule, sampling_processors
from model.methods.registry import METHODS
from tests.model.decoded import drafter_for, random_ids, target_of
from tests.pairs import pairs

SETTINGS = [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.5, 12, 1.0)]


@pytest.mark.parametrize(("method", "setting"), pairs(METHODS, SETTINGS, each=2))
def test_one_generator_gives_one_text_whatever_the_method(
    method: str, setting: tuple[float, int, float]
) -> None:
    target = target_of("Llama, grouped heads")
    texts = []
    for name in ("vanilla", method):
        rule = SamplingRule(sampling_processors(*setting), torch.Generator().manual_seed(11))
        options = {"policy": "original"} if name == "recycling" else {}  # whose loop goes on unseen
        drafter = drafter_for(name, target, **options)
        answers = [
            generate(target, drafter, random_ids(9), max_new_tokens=30, eos_ids=[4], rule=rule)
            for _ in range(3)  # the second answer goes on with the generator of the first
        ]
        texts.append([answer.token_ids for answer in answers])
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == 3, "three draws gave the same text"


def test_sampling_processors_are_the_warpers_asked_for() -> None:
    names = [type(processor).__name__ for processor in sampling_processors(0.7, 5, 0.9)]
    assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]
    assert sampling_processors(1.0, 0, 1.0) == []
