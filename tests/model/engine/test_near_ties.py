"""Near-ties in float32: the order of two logits that differ by rounding is plain decoding's order.

The models here have output rows in pairs of twins that differ in their last bits, so that every
greedy choice (or one in eight) hangs on how a forward pass rounds.
"""

from __future__ import annotations

import pytest
import torch

import model.engine.read_out
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.kernels.attention import AttentionKernels
from model.kernels.short_pass import short_pass_kernel
from model.methods import METHODS
from tests.model.decoded import drafter_for
from tests.random_llama import random_llama

VOCAB_SIZE = 64
NUM_TOKENS = 60


def model_with_twins(
    seed: int, stride: int, has_kernel: bool = False, shift: float = 0.0, noise: float = 1e-7
) -> TargetModel:
    """Return a random Llama whose output rows `stride * i` and `stride * i + 1` are near-equal.

    With `has_kernel` passes use our attention kernel. All logits are lower by `shift`.
    Twins differ by the share `noise`.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
    llama = random_llama(VOCAB_SIZE, seed, max_position_embeddings=512, **sizes)
    with torch.no_grad():
        rows = llama.lm_head.weight
        rows[1::stride] = rows[0::stride] * (1 + noise * torch.randn(VOCAB_SIZE // stride, 64))
        llama.lm_head.bias = torch.nn.Parameter(torch.full((VOCAB_SIZE,), -shift))
    target = TargetModel(llama)
    target.__dict__["attention"] = AttentionKernels(target.config, True, has_kernel)
    return target


def tokens_of(target: TargetModel, method: str, prompt: list[int]) -> list[int]:
    """Return the tokens of a method."""
    drafter = drafter_for(method, target)
    generation = generate(target, drafter, prompt, max_new_tokens=NUM_TOKENS)
    assert sum(generation.accept_lengths) == len(generation.token_ids)
    return generation.token_ids


def num_differing(stride: int, has_kernel: bool = False, shift: float = 0.0) -> int:
    """Count the answers that differ from plain decoding's: every method meets one of two models."""
    count = 0
    for seed in range(2):
        target = model_with_twins(seed, stride, shift=shift)
        prompt = torch.randint(VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(seed))
        plain = tokens_of(target, "vanilla", prompt.tolist())
        target = model_with_twins(seed, stride, has_kernel, shift)
        for method in list(METHODS)[seed::2]:
            count += tokens_of(target, method, prompt.tolist()) != plain
    return count


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("stride", [2, 8])
def test_near_ties_fall_as_in_plain_decoding(stride: int, has_kernel: bool) -> None:
    if has_kernel and not short_pass_kernel():
        pytest.skip("the kernels cannot be built here")
    assert num_differing(stride, has_kernel) == 0


@pytest.mark.parametrize("shift", [4.0, 6.0])
def test_near_ties_at_a_logit_of_nothing_are_near_ties(shift: float) -> None:
    """The largest logits are near 0, where a share of them is less than their rounding."""
    assert num_differing(2, shift=shift) == 0


@pytest.mark.parametrize("method", ["pld", "recycling"])
def test_a_criterion_is_asked_about_a_token_that_plain_decoding_decides(method: str) -> None:
    target = model_with_twins(0, 2)
    prompt = torch.randint(VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    plain = tokens_of(target, "vanilla", prompt)
    for end in range(31, 40):
        answer = generate(
            target,
            drafter_for(method, target),
            prompt,
            max_new_tokens=40,
            stop=lambda text, end=end: len(text) >= end,
        )
        assert answer.token_ids == plain[: end - 30]
        assert answer.steps[-1].stop_reason == "criteria"


def test_the_models_have_near_ties_that_fall_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.engine.read_out, "TIE_STEPS", 0)
    assert num_differing(2) > 0, "without the rule nothing differs: the test above proves nothing"
