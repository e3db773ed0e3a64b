"""The target model: attention fallback, context borders, and prompts read in chunks.

Run: pytest tests/model/backends/test_target.py
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import Cache, PreTrainedModel

import model.backends.target
from model.backends.proofs.self_test import plain_logits, self_test
from model.backends.proofs.support import ATTENTION, UnsupportedModelError
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.methods import METHODS
from tests.hang import HANG
from tests.model.decoded import drafter_for, known, random_ids, referee, target_of
from tests.model.families.family import Family
from tests.pairs import pairs

BORDER = 48


@pytest.mark.parametrize("config", ["LlamaConfig", "GptOssConfig"])
def test_attention_that_takes_no_mask_is_replaced_with_a_warning(
    config: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 2}
    loaded = Family("any", config, options if config == "GptOssConfig" else {}).build()
    loaded.set_attn_implementation("flex_attention")
    with caplog.at_level(logging.WARNING):
        target = TargetModel(loaded)
    assert target.config._attn_implementation in ATTENTION
    assert "flex_attention" in caplog.text
    self_test(target)
    assert not target.chain_only


def test_a_model_without_usable_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not supported")

    loaded = Family("any", "LlamaConfig").build()
    loaded.set_attn_implementation("flex_attention")
    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", refuse)
    with pytest.raises(UnsupportedModelError, match="flex_attention; allowed: sdpa, eager"):
        TargetModel(loaded)


def test_a_model_whose_plain_pass_fails_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken\nin two lines")

    loaded = Family("any", "LlamaConfig").build()
    monkeypatch.setattr(loaded.model, "forward", fail)
    with pytest.raises(UnsupportedModelError, match=r"RuntimeError: broken$"):
        TargetModel(loaded)


@pytest.mark.parametrize(("method", "chunk"), pairs(METHODS, [1, 7]))
def test_prompts_read_in_chunks_give_the_same_tokens(
    method: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("Mistral, sliding window")
    prompt = random_ids(30)
    expected = generate(target, drafter_for(method, target), prompt, max_new_tokens=20)
    monkeypatch.setattr(model.backends.target, "PREFILL_CHUNK", chunk)
    answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=20)
    assert answer.token_ids == expected.token_ids == referee(target, prompt, 20)
    assert answer.accept_lengths == expected.accept_lengths, "harvested rows depend on the chunks"


def test_what_long_passes_use_is_found_once_for_all_lengths() -> None:
    target = TargetModel(known("Llama, grouped heads").build())
    for num_rows in range(200, 230):
        with target.kernels(num_rows):
            pass
    assert len(target._swaps) == 1


def test_prefill_stops_one_token_short_and_gives_logits_on_request() -> None:
    target = TargetModel(Family("any", "LlamaConfig").build())
    prompt = random_ids(9)
    with torch.inference_mode():
        for with_logits in (False, True):
            cache = target.new_cache(9)
            (chunk,) = target.prefill(prompt, cache, with_logits)
            assert cache.length == 8 and list(chunk.token_ids) == prompt[:-1]
            assert (chunk.logits is not None) == with_logits
        assert chunk.logits is not None
        torch.testing.assert_close(chunk.logits, plain_logits(target, prompt[:-1]))


def test_a_forward_without_logits_to_keep_works(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetModel(Family("any", "LlamaConfig").build())
    prompt = random_ids(12)
    expected = referee(target, prompt, 20)
    monkeypatch.setattr(target, "parameters", target.parameters - {"logits_to_keep"})
    answer = generate(target, drafter_for("pld", target), prompt, max_new_tokens=20)
    assert answer.token_ids == expected


@pytest.mark.parametrize("method", METHODS)
def test_prompts_beyond_the_longrope_border_equal_generate(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("Phi 3, longrope")
    # Chunks in front of the border would be read with the frequencies of short texts.
    monkeypatch.setattr(model.backends.target, "PREFILL_CHUNK", 7)
    for length in (BORDER + 1, BORDER + 20):
        prompt = random_ids(length)
        answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=30)
        assert answer.token_ids == referee(target, prompt, 30), f"prompt of {length} tokens"


@lru_cache
def scaled_llama4() -> TargetModel:
    """Return a Llama 4 whose queries are scaled anew every 32 positions."""
    options = {**known("Llama 4 text").options, "floor_scale": 32, "attn_scale": 2.0}
    target = TargetModel(Family("scaled", "Llama4TextConfig", options).build())
    self_test(target)
    assert not target.chain_only
    return target


@pytest.mark.parametrize("method", METHODS)
def test_queries_scaled_by_key_index_equal_generate(method: str) -> None:
    target = scaled_llama4()
    prompt = random_ids(20)
    answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=60)
    assert answer.token_ids == referee(target, prompt, 60)


def test_a_draft_that_reaches_over_a_step_of_scaling_is_a_chain() -> None:
    target = scaled_llama4()
    assert target.chain_only_at(base=20, num_nodes=12)
    assert not target.chain_only_at(base=20, num_nodes=11)
    assert not target.chain_only_at(base=31, num_nodes=32)
    prefix = random_ids(30)
    siblings = DraftTree.from_lists([prefix[-1], 7, 8], (-1, 0, 0))
    with torch.inference_mode():
        cache = target.new_cache(40)
        for _ in target.prefill(prefix, cache, with_logits=False):
            pass
        # Both siblings have position 30; the second is row 31, where the next step of scaling begins.
        logits = target.forward(siblings, cache)
        expected = plain_logits(target, [*prefix, 8])[-1]
    error = float((logits[2] - expected).abs().max())
    assert (error > 1e-2) == target.chain_only_at(base=29, num_nodes=3), f"error {error:.1e}"


@pytest.mark.parametrize("name", ["attention", "linear_kernels", "norms"])
def test_measurements_of_one_model_do_not_wait_for_each_other(name: str) -> None:
    network = known("Llama, grouped heads").build()
    one, other = TargetModel(network), TargetModel(network)
    is_held, is_looking = threading.Event(), threading.Event()
    found: dict[TargetModel, Any] = {}

    def look_within_a_pass() -> None:
        with one.lock:
            is_held.set()
            is_looking.wait()
            time.sleep(0.05)  # so that the other thread waits for this pass to end
            found[one] = getattr(one, name)

    def look() -> None:
        is_held.wait()
        is_looking.set()
        found[other] = getattr(other, name)

    threads = [threading.Thread(target=work, daemon=True) for work in (look_within_a_pass, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANG)
        assert not thread.is_alive(), "the two wait for each other"
    assert {target: getattr(target, name) for target in (one, other)} == found, "chosen again"
    assert type(found[one]) is type(found[other])


def test_a_cache_class_that_is_made_in_a_way_of_its_own_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = known("Llama, grouped heads").build()
    module = sys.modules[type(model.base_model).__module__]

    class OddCache(Cache):
        def __init__(self, secret: int) -> None:
            super().__init__(layers=[])

    OddCache.__module__ = module.__name__
    monkeypatch.setattr(module, "OddCache", OddCache, raising=False)
    with pytest.raises(UnsupportedModelError, match=r"llama: .* its OddCache is made from secret;"):
        TargetModel(model)
