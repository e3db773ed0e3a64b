"""A decoder's model must be unchanged since it was loaded, and is locked for each pass.

Run: pytest tests/model/engine/test_decoder_and_model.py
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from model import TokenRecycling
from tests.model.api.test_decoder import LLAMA, PROMPT, decoder_for, demo
from tests.model.decoded import SEEDED, known, random_ids, referee


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training mode.*call model.eval\(\) first"):
        TokenRecycling(known(LLAMA).build().train())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.train(), "training mode"),
        (lambda model: model.to(torch.bfloat16), r"got torch.bfloat16 .* make a new decoder"),
        (lambda model: model.resize_token_embeddings(90), r"with 90 tokens; .* make a new decoder"),
        (lambda model: model.resize_token_embeddings(50), r"with 50 tokens; .* make a new decoder"),
    ],
)
def test_a_model_that_was_changed_since_is_refused(change: Any, message: str) -> None:
    decoder = TokenRecycling(known(LLAMA).build())
    decoder.generate([1, 2], max_new_tokens=4)
    change(decoder.target.model)
    with pytest.raises(ValueError, match=message):
        decoder.generate([1, 2], max_new_tokens=4)


def test_autocast_to_another_dtype_is_refused() -> None:
    model = known(LLAMA).build()
    decoder = TokenRecycling(model)
    message = "autocast: computes in torch.bfloat16; allowed: off, or the model's torch.float32"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match=message):
            decoder.generate([1, 2], max_new_tokens=4)
        with pytest.raises(ValueError, match=message):
            TokenRecycling(model)
        half = TokenRecycling(known(LLAMA).build().to(torch.bfloat16))
        assert len(half.generate([1, 2], max_new_tokens=4).token_ids) == 4
    assert len(decoder.generate([1, 2], max_new_tokens=4).token_ids) == 4


def test_attention_that_takes_no_tree_mask_is_switched_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = TokenRecycling(known(LLAMA).build())
    prompt = random_ids(20)
    expected = decoder.generate(prompt, max_new_tokens=10).token_ids
    decoder.target.model.set_attn_implementation("flex_attention")
    decoder.reset()
    assert decoder.generate(prompt, max_new_tokens=10).token_ids == expected
    assert "flex_attention takes no tree mask" in caplog.text


def test_two_methods_on_one_model_serve_two_threads(caplog: pytest.LogCaptureFixture) -> None:
    interval = sys.getswitchinterval()
    model, tokenizer = demo()
    stock = model.config._attn_implementation
    decoders = [decoder_for(method, model, tokenizer) for method in ("recycling", "pld")]
    prompts = [tokenizer(text).input_ids for text in (PROMPT, "USER: Hello. ASSISTANT:")]

    def answer(index: int) -> list[int]:
        decoders[index].reset()
        return decoders[index].generate(prompts[index], max_new_tokens=24).token_ids

    expected = [answer(0), answer(1)]
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            for _ in range(3):
                assert list(pool.map(answer, (0, 1))) == expected
    finally:
        sys.setswitchinterval(interval)
    assert model.config._attn_implementation == stock
    assert caplog.text == "", "the kernels of one are no setting of the other"


@pytest.mark.parametrize("family", ["Mistral, sliding window", "Gemma 3 text"])
def test_a_decoder_may_be_made_while_another_decodes(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = known(family).build()
    decoder = decoder_for("pld", model)
    prompt = random_ids(40)  # the windows are 8 tokens wide
    expected = referee(decoder.target, prompt, 12)
    is_done = threading.Event()

    def make() -> None:
        while not is_done.is_set():
            decoder_for("pld", model)

    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(make)
        texts = []
        try:
            for _ in range(10):
                decoder.reset()
                steps = decoder.steps(prompt, max_new_tokens=12)
                texts.append([token for step in steps for token in step.tokens])
        finally:
            is_done.set()  # or the pool waits for ever
        making.result()
    assert texts == [expected] * 10
    assert caplog.text == "", "the kernels of one are no setting of the other"


@pytest.mark.parametrize("method", SEEDED)
def test_torchs_default_device_need_not_be_the_models(method: str) -> None:
    """It need not be the host either, as after torch.set_default_device("cuda")."""
    model, prompt = known(LLAMA).build(), random_ids(20)
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    expected = decoder_for(method, model).generate(prompt, **options).token_ids
    with torch.device("meta"):
        decoder = decoder_for(method, model)
        for _ in range(2):
            assert decoder.generate(prompt, **options).token_ids == expected
        assert len(decoder.generate(prompt, max_new_tokens=12).token_ids) == 12
