"""Rotary embeddings whose frequencies depend on the largest position of a call: no text crosses
their border, whatever the config calls it.

Run: pytest tests/model/backends/test_rope_borders.py
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

import model.backends.passes.loaded_model
from model.api.decoder import SpeculativeDecoder
from model.backends.proofs.self_test import self_test
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.methods import METHODS
from tests.model.decoded import BY_NAME, drafter_for, known, random_ids, referee
from tests.model.families.families_with_trees import LONGROPE
from tests.model.families.family import IS_VERSION_4, VERSION, Family
from tests.pairs import pairs

BORDER = 48
NUM_NEW = 40
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0]}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Gemma 3 keeps one rope setting for each type of layer (transformers 5).
LAYERED = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": BORDER,
        **FACTORS,
    },
}
KINDS = [*LAYERED, "phimoe"]


def layered(kind: str) -> TargetModel:
    """Return a Gemma 3 whose full-attention layers have rotary embeddings of this kind."""
    if IS_VERSION_4:
        pytest.skip("one rope setting a layer type came with transformers 5")
    if kind == "longrope" and VERSION < (5, 21):
        pytest.skip("this version of transformers fails at a second pass beyond such a border")
    options: dict[str, Any] = {
        **known("Gemma 3 text").options,
        "max_position_embeddings": BORDER if kind == "dynamic" else 4 * BORDER,
        "rope_parameters": {"full_attention": LAYERED[kind], "sliding_attention": PLAIN_ROPE},
    }
    return checked(Family(f"layered {kind}", "Gemma3TextConfig", options))


@lru_cache
def target_with(kind: str) -> TargetModel:
    """Return the target of one of `KINDS`."""
    return phimoe() if kind == "phimoe" else layered(kind)


def phimoe() -> TargetModel:
    """Return a PhiMoE with longrope: its scale, too, changes at the border."""
    scales = {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": BORDER}
    options = {
        **BY_NAME["PhiMoE"].options,
        **LONGROPE,
        "rope_scaling": {**LONGROPE["rope_scaling"], **scales},
    }
    return checked(Family("PhiMoE, longrope", "PhimoeConfig", options))


def checked(family: Family) -> TargetModel:
    """Return the target of a family that verifies trees."""
    target = TargetModel(family.build())
    self_test(target)
    assert not target.chain_only
    return target


@pytest.mark.parametrize(("method", "kind"), pairs(METHODS, KINDS))
def test_texts_end_at_the_border(kind: str, method: str) -> None:
    target = target_with(kind)
    prompt = random_ids(30)
    answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=NUM_NEW)
    assert answer.token_ids == referee(target, prompt, NUM_NEW)[: BORDER - 30]
    assert answer.steps[-1].stop_reason == "context"


@pytest.mark.parametrize(("method", "kind"), pairs(METHODS, KINDS[1:]))
def test_prompts_beyond_the_border_equal_generate(kind: str, method: str) -> None:
    target = target_with(kind)
    prompt = random_ids(BORDER + 3)
    answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=NUM_NEW)
    assert answer.token_ids == referee(target, prompt, NUM_NEW)


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_a_conversation_that_grows_over_the_border_takes_no_rows_along(kind: str) -> None:
    target = target_with(kind) if kind == "phimoe" else checked(known("Phi 3, longrope"))
    decoder = SpeculativeDecoder(target.model)
    prompt = random_ids(BORDER - 10)
    short = decoder.generate(prompt, max_new_tokens=10)
    assert short.token_ids == referee(target, prompt, 10)
    grown = [*short.sequences[0].tolist(), *random_ids(5, seed=1)]
    longer = decoder.generate(grown, max_new_tokens=NUM_NEW)
    assert longer.token_ids == referee(target, grown, NUM_NEW)


@pytest.mark.parametrize("length", [BORDER, BORDER + 10])
def test_prompts_beyond_a_dynamic_border_are_refused(length: int) -> None:
    target = TargetModel(known("Llama, dynamic rope").build())
    with pytest.raises(ValueError, match=f"got {length} tokens; allowed: fewer than .* of 48"):
        generate(target, drafter_for("vanilla", target), random_ids(length), max_new_tokens=5)


@pytest.mark.parametrize("name", ["Phi 3, longrope", "Llama, dynamic rope"])
def test_beyond_the_border_a_draft_would_change_the_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: without the limit the same texts come out wrong."""
    target = TargetModel(known(name).build())
    prompt = random_ids(30)
    expected = referee(target, prompt, NUM_NEW)
    monkeypatch.setattr(model.backends.passes.loaded_model, "context_limit", lambda *_: 4 * BORDER)
    answer = generate(
        target, drafter_for("recycling", target), prompt, max_new_tokens=NUM_NEW
    ).token_ids
    assert answer[: BORDER - 30 - 8] == expected[: BORDER - 30 - 8]
    assert answer != expected
