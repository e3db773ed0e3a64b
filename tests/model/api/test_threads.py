"""Threads: a model stays its user's while decoders run, and texts of one decoder wait for each other.

No test depends on the clock: one thread works until the other one has done its share.

Run: pytest tests/model/api/test_threads.py
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import SpeculativeDecoder
from model.backends.proofs.self_test import self_test
from model.backends.target import TargetModel
from tests.hang import HANG
from tests.model.decoded import referee, required_options
from tests.model.families.family import IS_VERSION_4

DATA = Path(__file__).resolve().parents[3] / "data/demo"
PROMPTS = [
    "USER: Tell me about the sea. ASSISTANT:",
    "USER: Who are you? ASSISTANT:",
    "USER: Name three colours, and then name them again, please. ASSISTANT:",
]
NUM_TOKENS = 12
NUM_ROUNDS = 2  # of both threads


@lru_cache(maxsize=3)
def loaded(folder: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a model of the repository, and its tokenizer."""
    if IS_VERSION_4 and folder == "hybrid-model":
        pytest.skip("Qwen3.5 is not in transformers 4.57")
    model = AutoModelForCausalLM.from_pretrained(DATA / folder, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(DATA / folder)


def decoder_of(model: Any, method: str) -> SpeculativeDecoder:
    return SpeculativeDecoder(model, None, method, **required_options(method, model.config))


def plain(model: Any, prompt: list[int]) -> list[int]:
    """Return the new tokens of the model's own greedy generation."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@contextmanager
def beside(work: Callable[[], object]) -> Any:
    """Within the block another thread does this work over and over; what it raises is raised at the end."""
    is_over, failures, rounds = threading.Event(), [], []

    def run() -> None:
        while not is_over.is_set():
            try:
                work()
            except BaseException as error:
                failures.append(error)
            rounds.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield rounds
    finally:
        is_over.set()
        thread.join()
    if failures:
        raise failures[0]


# Each model, method and dtype is met: methods that read tokens, rows of logits and hidden states.
CASES = [
    ("model", "recycling", torch.float32),
    ("model", "medusa", torch.float32),
    ("model", "eagle3", torch.float32),
    ("model", "hybrid", torch.bfloat16),
    ("hybrid-model", "hybrid", torch.float32),
]


@pytest.mark.parametrize(("folder", "method", "dtype"), CASES)
def test_plain_generation_beside_a_decoder_gives_what_it_gives_alone(
    folder: str, method: str, dtype: torch.dtype
) -> None:
    model, tokenizer = loaded(folder, dtype)
    prompts = [tokenizer(text).input_ids for text in PROMPTS[:2]]
    expected = [plain(model, prompt) for prompt in prompts]
    decoder = decoder_of(model, method)
    alone = [decoder.generate(prompt, max_new_tokens=NUM_TOKENS).token_ids for prompt in prompts]
    if dtype == torch.float32:
        assert alone == [one[: len(two)] for one, two in zip(expected, alone, strict=True)]

    def generate() -> None:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert plain(model, prompt) == tokens, "plain generation changed"

    with beside(generate) as rounds:
        while len(rounds) < NUM_ROUNDS:
            found = [
                decoder.generate(prompt, max_new_tokens=NUM_TOKENS).token_ids for prompt in prompts
            ]
            if dtype == torch.float32:
                assert found == alone, "the decoder's text changed"


def test_decoders_of_one_model_in_two_threads_give_what_they_give_alone() -> None:
    model, tokenizer = loaded("model", torch.float32)
    prompts = [tokenizer(text).input_ids for text in PROMPTS[:2]]
    first, second = decoder_of(model, "medusa"), decoder_of(model, "recycling")
    twin = copy.copy(first)
    assert twin.target is first.target
    expected = [referee(first.target, prompt, NUM_TOKENS, eos_id=2) for prompt in prompts]

    def answer(decoder: SpeculativeDecoder) -> None:
        found = [decoder.generate(one, max_new_tokens=NUM_TOKENS).token_ids for one in prompts]
        assert found == expected

    with beside(lambda: answer(second)), beside(lambda: answer(twin)):
        for _ in range(NUM_ROUNDS):
            answer(first)


@pytest.mark.parametrize("folder", ["model", "hybrid-model"])
def test_a_model_is_probed_and_proved_beside_plain_generation(folder: str) -> None:
    model, tokenizer = loaded(folder, torch.float32)
    prompt = tokenizer(PROMPTS[0]).input_ids
    expected = plain(model, prompt)

    def generate() -> None:
        assert plain(model, prompt) == expected

    with beside(generate) as rounds:
        while len(rounds) < NUM_ROUNDS:
            target = TargetModel(model)
            self_test(target)
            target.hidden_states((-1, 0))


def test_training_beside_a_decoder_gets_its_gradients() -> None:
    model, tokenizer = loaded("model", torch.float32)
    model = copy.deepcopy(model)
    prompt = tokenizer(PROMPTS[0]).input_ids
    ids = torch.tensor([prompt])

    def gradients() -> list[torch.Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = gradients()

    def train() -> None:
        for one, other in zip(gradients(), expected, strict=True):
            assert torch.equal(one, other)

    decoder = decoder_of(model, "recycling")
    with beside(train) as rounds:
        while len(rounds) < NUM_ROUNDS:
            decoder.generate(prompt, max_new_tokens=NUM_TOKENS)


def test_a_model_that_is_copied_in_the_midst_of_a_pass_is_as_it_was_loaded() -> None:
    model, tokenizer = loaded("model", torch.float32)
    prompt = tokenizer(PROMPTS[0]).input_ids
    expected = plain(model, prompt)
    target = TargetModel(model)
    with target.kernels(8):
        copied = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert plain(model, prompt) == expected
    assert plain(again, prompt) == expected
    assert plain(copied, prompt) != expected, "it computes with the weights of the first"


def test_a_forward_that_the_user_sets_on_a_layer_is_used_and_stays() -> None:
    model, tokenizer = loaded("model", torch.float32)
    model = copy.deepcopy(model)
    target = TargetModel(model)
    layer = model.model.layers[0].mlp.down_proj
    prompt = tokenizer(PROMPTS[0]).input_ids
    assert target.kernel_names["linear"]  # found before the layer changes
    calls = []

    def forward(rows: torch.Tensor) -> torch.Tensor:
        calls.append(rows.shape[-2])
        return type(layer).forward(layer, rows)

    layer.forward = forward
    with target.kernels(1), torch.inference_mode():
        model(torch.tensor([prompt]))
    assert calls == [len(prompt)]
    assert layer.forward is forward


def test_texts_of_one_decoder_wait_for_each_other() -> None:
    """As an endpoint with four clients, two of whom hang up."""
    model, tokenizer = loaded("model", torch.float32)
    decoder = decoder_of(model, "recycling")
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    expected = [referee(decoder.target, prompt, NUM_TOKENS, eos_id=2) for prompt in prompts]

    def request(number: int) -> list[int]:
        prompt, kind = prompts[number % len(prompts)], number % 4
        if kind == 0:
            return decoder.generate(prompt, max_new_tokens=NUM_TOKENS).token_ids
        pieces = decoder.stream(prompt, max_new_tokens=NUM_TOKENS)
        if kind == 1:
            return [token for piece in pieces for token in piece.token_ids]
        begun = next(pieces).token_ids
        if kind == 2:
            pieces.close()
        return begun

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(request, range(24)))
    for number, answer in enumerate(answers):
        whole = expected[number % len(prompts)]
        assert answer == (whole if number % 4 < 2 else whole[: len(answer)]), number


@pytest.mark.parametrize("way", ["leave", "close", "collect", "last step", "error"])
def test_a_stream_that_is_over_in_any_way_frees_the_decoder(way: str) -> None:
    model, tokenizer = loaded("model", torch.float32)
    decoder = decoder_of(model, "recycling")
    prompt = tokenizer(PROMPTS[0]).input_ids

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("stop")

    if way == "leave":
        for _ in decoder.stream(prompt, max_new_tokens=NUM_TOKENS):
            break
    else:
        wrong = [fail] if way == "error" else ()
        stream = decoder.stream(prompt, max_new_tokens=NUM_TOKENS, logits_processors=wrong)
        if way == "error":
            with pytest.raises(ArithmeticError):
                next(stream)
        while way == "last step" and next(stream).record.stop_reason is None:
            pass
        if way in ("close", "collect"):
            next(stream)
        if way == "close":
            stream.close()
        if way == "collect":
            cycle: list[object] = [stream]
            cycle.append(cycle)  # as a web server leaves that of a client that is gone
            del stream, cycle
    with ThreadPoolExecutor(1) as pool:  # another thread, which would have to wait
        pool.submit(decoder.generate, prompt, max_new_tokens=2).result(timeout=HANG)


def test_a_text_is_refused_while_another_is_open_and_not_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = loaded("model", torch.float32)
    decoder = decoder_of(model, "recycling")
    prompt = tokenizer(PROMPTS[0]).input_ids
    expected = referee(decoder.target, prompt, NUM_TOKENS, eos_id=2)
    monkeypatch.setattr("model.api.permits.PATIENCE", 0.01)
    stream = decoder.stream(prompt, max_new_tokens=NUM_TOKENS)
    said = next(stream).token_ids
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(decoder.generate, prompt, max_new_tokens=2)
        with pytest.raises(RuntimeError, match=r"was not continued for 0.01 s; .*decoder.session"):
            waiting.result()
    assert said + [token for piece in stream for token in piece.token_ids] == expected
    decoder.generate(prompt, max_new_tokens=2)


def test_sessions_decode_texts_at_the_same_time() -> None:
    model, tokenizer = loaded("model", torch.float32)
    decoder = decoder_of(model, "recycling")
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    expected = [referee(decoder.target, prompt, NUM_TOKENS, eos_id=2) for prompt in prompts]
    decoder.generate(prompts[0], max_new_tokens=NUM_TOKENS)
    first, second = decoder.session(), decoder.session()
    assert first.target is decoder.target and first.drafter is not decoder.drafter
    known = decoder.drafter.memory()["adjacency"]
    assert known.any() and torch.equal(first.drafter.memory()["adjacency"], known)
    streams = [
        one.stream(prompt, max_new_tokens=NUM_TOKENS)
        for one, prompt in zip((decoder, first, second), prompts, strict=True)
    ]
    found: list[list[int]] = [[], [], []]
    for pieces in zip_longest(*streams):
        for answer, piece in zip(found, pieces, strict=True):
            answer += [] if piece is None else piece.token_ids
    assert found == expected


def test_a_stream_checks_its_arguments_when_it_is_called() -> None:
    model, tokenizer = loaded("model", torch.float32)
    decoder = decoder_of(model, "recycling")
    prompt = tokenizer(PROMPTS[0]).input_ids
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"stop_strings": "a"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            decoder.stream(prompt, **wrong)
    with pytest.raises(ValueError, match="context"):
        decoder.stream([1] * 5000)
