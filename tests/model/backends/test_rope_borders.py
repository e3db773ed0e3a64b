"""Families whose numbers depend on the length of the text: around every border, texts are `generate`'s.

Each border is met by prompts that end before, on and behind it, and by texts that stay below it, reach it and grow
over it.

Run: pytest tests/model/backends/test_rope_borders.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from model.api.accelerate import accelerate
from model.api.decoder import SpeculativeDecoder
from model.backends.proofs.self_test import self_test
from model.backends.proofs.support import UnsupportedModelError
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.methods import METHODS
from tests.model.decoded import drafter_for, known, random_ids
from tests.model.families.families_with_trees import LONGROPE
from tests.model.families.family import IS_VERSION_4, VERSION, Family
from tests.pairs import pairs

BORDER = 48
NUM_NEW = 9
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


def layered(kind: str) -> Family:
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
    return Family(f"layered {kind}", "Gemma3TextConfig", options)


def phimoe() -> Family:
    """Return a PhiMoE with longrope: its scale, too, changes at the border."""
    scales = {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": BORDER}
    scaling = {**LONGROPE["rope_scaling"], **scales}
    options = {**known("PhiMoE").options, **LONGROPE, "rope_scaling": scaling}
    return Family("PhiMoE, longrope", "PhimoeConfig", options)


def ministral() -> Family:
    """Return a Ministral 3 whose queries are scaled anew every 48 positions."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": BORDER,
        "llama_4_scaling_beta": 3.0,
    }
    options = {**known("Ministral 3").options, "rope_parameters": rope}
    return Family("Ministral 3, scaled", "Ministral3Config", options)


def llama4() -> Family:
    """Return a Llama 4 whose queries are scaled anew every 24 positions."""
    options = {**known("Llama 4 text").options, "floor_scale": BORDER // 2, "attn_scale": 2.0}
    return Family("Llama 4, scaled", "Llama4TextConfig", options)


class Case(NamedTuple):
    """A family with a border."""

    family: Callable[[], Family]
    border: int = BORDER


CASES = {
    "Phi 3": Case(lambda: known("Phi 3, longrope")),
    "PhiMoE": Case(phimoe),
    "layered longrope": Case(lambda: layered("longrope")),
    "dynamic": Case(lambda: known("Llama, dynamic rope")),
    "layered dynamic": Case(lambda: layered("dynamic")),
    "Llama 4": Case(llama4, BORDER - 1),
    "Ministral 3": Case(ministral),
    "yarn": Case(lambda: known("Llama, yarn rope"), 32),
    "sliding window": Case(lambda: known("Mistral, sliding window"), 8),
    "Bloom": Case(lambda: known("BLOOM")),
    "MPT": Case(lambda: known("MPT")),
    "Falcon": Case(lambda: known("Falcon, alibi")),
}
CHANGING = [name for name in CASES if "longrope" in name or "dynamic" in name or "Phi" in name]
TRAIN_FREE = ("recycling", "pld", "hybrid")
OTHERS = [method for method in METHODS if method not in TRAIN_FREE]


@cache
def target_of(name: str) -> TargetModel:
    """Return the tested target of a case."""
    target = TargetModel(CASES[name].family().build())
    self_test(target)
    return target


@cache
@torch.inference_mode(mode=False)
def expected(name: str) -> dict[tuple[int, ...], list[int]]:
    """Return `generate`'s tokens by prompt, three tokens before the border to three behind it.

    Each is of a new model: dynamic frequencies follow the longest text that a model has seen.
    """
    found, (family, border) = {}, CASES[name]
    for length in range(border - 3, border + 4):
        prompt = random_ids(length, seed=length)
        answer = by_generate(family().build(), prompt)
        found[tuple(prompt)] = answer
    return found


def by_generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return the new tokens of the model's own `generate`."""
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_NEW}
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return answer[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for name in CASES for method in TRAIN_FREE]
    + pairs(CHANGING, OTHERS, -(-len(OTHERS) // len(CHANGING))),
)
def test_texts_around_a_border_equal_generate(name: str, method: str) -> None:
    target = target_of(name)
    for prompt, tokens in expected(name).items():
        for limit in (2, NUM_NEW):
            drafter = drafter_for(method, target)
            answer = generate(target, drafter, list(prompt), max_new_tokens=limit)
            assert answer.token_ids == tokens[:limit], f"prompt of {len(prompt)}, {limit} new"


@pytest.mark.parametrize("name", CASES)
def test_batches_sessions_and_accelerated_models_equal_generate(name: str) -> None:
    texts = expected(name)
    decoder = SpeculativeDecoder(target_of(name).model)
    answers = decoder.generate_all(list(map(list, texts)), batch_size=3, max_new_tokens=NUM_NEW)
    assert [answer.token_ids for answer in answers] == list(texts.values())
    # Kept rows of the text before, whose beginning is that of the next.
    for prompt, tokens in texts.items():
        for read in (prompt[: len(prompt) // 2], prompt):
            answer = decoder.generate(list(read), max_new_tokens=NUM_NEW)
        assert answer.token_ids == tokens
    model = accelerate(CASES[name].family().build())
    for prompt, tokens in texts.items():
        assert by_generate(model, list(prompt)) == tokens, f"prompt of {len(prompt)}"


@pytest.mark.parametrize("name", ["Phi 3", "PhiMoE", "layered longrope"])
def test_a_conversation_that_grows_over_the_border_takes_no_rows_along(name: str) -> None:
    decoder = SpeculativeDecoder(target_of(name).model)
    prompt = random_ids(BORDER - NUM_NEW)
    for _ in range(3):
        answer = decoder.generate(prompt, max_new_tokens=NUM_NEW)
        assert answer.token_ids == by_generate(target_of(name).model, prompt)
        prompt = answer.sequences[0].tolist()


def test_drafts_go_on_behind_a_longrope_border_and_not_behind_a_dynamic_one() -> None:
    prompt = [3, 4, 5, 6] * (BORDER // 4 + 2)
    for name, drafts in (("Phi 3", True), ("dynamic", False)):
        target = target_of(name)
        answer = generate(target, drafter_for("recycling", target), prompt, max_new_tokens=30)
        assert any(step.tree.topology.num_nodes > 1 for step in answer.steps) == drafts


@pytest.mark.parametrize("name", ["Phi 3", "dynamic"])
def test_a_draft_over_the_border_would_change_the_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: without the border the same texts come out wrong."""
    target = TargetModel(CASES[name].family().build())
    prompt = random_ids(30)
    right = generate(target, drafter_for("recycling", target), prompt, max_new_tokens=40).token_ids
    monkeypatch.setattr(target, "borders", type(target.borders)())
    wrong = generate(target, drafter_for("recycling", target), prompt, max_new_tokens=40).token_ids
    assert wrong[: BORDER - 30 - 8] == right[: BORDER - 30 - 8]
    assert wrong != right


@pytest.mark.parametrize("length", [2 * BORDER, 2 * BORDER + 10])
def test_prompts_beyond_what_dynamic_frequencies_stretch_to_are_refused(length: int) -> None:
    target = target_of("dynamic")
    with pytest.raises(ValueError, match=f"got {length} tokens; allowed: fewer than .* of 96"):
        generate(target, drafter_for("vanilla", target), random_ids(length), max_new_tokens=5)


def test_a_model_that_does_not_say_what_it_does_at_its_border_is_refused() -> None:
    model = CASES["Phi 3"].family().build()

    class Own(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, *_: object, **__: object) -> None:
            raise KeyError("seen_tokens")

    model.__class__ = Own
    with pytest.raises(UnsupportedModelError, match=r"beyond 48 tokens, .*KeyError: 'seen"):
        TargetModel(model)
