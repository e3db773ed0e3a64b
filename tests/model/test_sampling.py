"""Sampling is ancestral sampling: the same text as plain decoding, and the right distribution.

Run: pytest tests/model/test_sampling.py
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from model.decoding import generate
from model.drafter import METHODS
from model.hf import TargetModel, sampling_processors
from model.verification import SamplingRule, TokenRule
from tests.model.decoded import drafter_for, random_ids, target_of
from tests.model.family import Family

SETTINGS = [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.5, 12, 1.0)]
SMALL_VOCAB = 8
LENGTH = 2
PROMPT = [1, 2, 3]
NUM_SAMPLES = 1500


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", SETTINGS)
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


@pytest.fixture(scope="module")
def small() -> TargetModel:
    """A model with 8 tokens."""
    return TargetModel(Family("small", "LlamaConfig", {"vocab_size": SMALL_VOCAB}).build(seed=2))


@torch.inference_mode()
def exact(target: TargetModel, setting: tuple[float, int, float]) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation, from plain passes."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, probability in found.items():
            ids = torch.tensor([[*PROMPT, *text]])
            scores = target.model(ids, use_cache=False).logits[:, -1].float()
            for processor in sampling_processors(*setting):
                scores = processor(ids, scores)
            row = scores.softmax(dim=-1)[0].tolist()
            longer |= {(*text, token): probability * row[token] for token in range(SMALL_VOCAB)}
        found = longer
    return found


def p_value(counts: Counter, expected: dict[tuple[int, ...], float]) -> float:
    """Return the probability of a chi-square this large (Wilson-Hilferty), rare cells pooled."""
    total = sum(counts.values())
    cells = [(counts[text], total * share) for text, share in expected.items()]
    common = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    pooled = (sum(cell[0] for cell in rare), sum(cell[1] for cell in rare))
    if pooled[1] > 0:
        common.append(pooled)
    chi_square = sum((seen - mean) ** 2 / mean for seen, mean in common)
    freedom = len(common) - 1
    spread = 2 / (9 * freedom)
    score = ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(score / math.sqrt(2))


def sampled(target: TargetModel, rule: TokenRule, method: str) -> Counter:
    """Return how often each continuation came; the drafter learns on from draw to draw."""
    drafter = drafter_for(method, target)
    return Counter(
        tuple(generate(target, drafter, PROMPT, max_new_tokens=LENGTH, rule=rule).token_ids)
        for _ in range(NUM_SAMPLES)
    )


@pytest.mark.parametrize("setting", SETTINGS[:2])
def test_samples_follow_the_exact_distribution(
    small: TargetModel, setting: tuple[float, int, float]
) -> None:
    expected = exact(small, setting)
    rule = SamplingRule(sampling_processors(*setting), torch.Generator().manual_seed(1))
    counts = sampled(small, rule, "recycling")
    assert all(expected[text] > 0 for text in counts), "a token that was filtered out came"
    assert p_value(counts, expected) > 1e-3


class EagerRule(SamplingRule):
    """Takes the likeliest token wherever it has more than 0.3: what a biased acceptance would do."""

    def choose(self, logits: torch.Tensor, prefix: Sequence[int], tie_margin: float = 0.0) -> int:
        """Return the likeliest token, or a draw."""
        probabilities = logits.float().softmax(dim=-1)
        if float(probabilities.max()) > 0.3:
            return int(probabilities.argmax())
        return super().choose(logits, prefix)


def test_a_biased_rule_fails_the_same_check(small: TargetModel) -> None:
    expected = exact(small, SETTINGS[0])
    rule = EagerRule([], torch.Generator().manual_seed(1))
    assert p_value(sampled(small, rule, "recycling"), expected) < 1e-6


def test_the_chi_square_is_calibrated() -> None:
    texts = list(itertools.product(range(4), repeat=2))
    expected = {text: 1 / 16 for text in texts}
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(200):
        draws = torch.randint(16, (400,), generator=generator).tolist()
        values.append(p_value(Counter(texts[draw] for draw in draws), expected))
    assert 0.4 < sum(values) / len(values) < 0.6
    assert 2 <= sum(value < 0.05 for value in values) <= 20
