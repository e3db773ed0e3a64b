"""Calls within calls: code of the user's that a text runs may ask for another text.

It gets the model's own text, or one line that says what to do, and never waits; the text around it stays exact.

Run: pytest tests/model/api/test_calls_within_calls.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer

from model import SpeculativeDecoder, accelerate, speculative
from tests.model.decoded import known

PROMPT, OTHER, THIRD = [5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9], [3, 4, 3, 4, 3, 4]
NUM_TOKENS = 6
PADDING = 1  # in none of the texts
DEMO = Path(__file__).resolve().parents[3] / "data/demo/model"
# What is called from within.
INNER = ("the same", "session", "another accelerated model", "plain model")
# From where, for each kind of text.
PLACES = {
    "generate": ("processor", "hook"),
    "steps": ("stop", "hook"),
    "stream": ("processor", "hook", "loop"),
    "as_completed": ("processor", "hook", "loop", "prompts"),
    "generate_all": ("processor", "hook"),
    "accelerated": ("processor", "criterion", "put", "end", "hook"),
    "accelerated batch": ("hook",),
    "callable": ("processor", "put", "hook"),
}
CASES = [(kind, place, inner) for kind in PLACES for place in PLACES[kind] for inner in INNER]


@cache
def tiny() -> Any:
    return known("Llama, grouped heads").build()


@cache
def demo() -> Any:
    """A model that is large enough for kernels."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def ask(generate: Callable[..., Any], *prompts: list[int], **options: Any) -> list[list[int]]:
    """Return the new tokens of calls of transformers' form."""
    ids = torch.tensor(prompts)
    words = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": PADDING} | options
    found = generate(input_ids=ids, attention_mask=torch.ones_like(ids), **words)
    rows = found[:, ids.shape[1] :].tolist()
    return [row[: row.index(PADDING)] if PADDING in row else row for row in rows]


@cache
def expected(find: Callable[[], Any], prompt: tuple[int, ...]) -> list[int]:
    """Return what a model that nobody has touched says."""
    return ask(copy.deepcopy(find()).generate, [*prompt])[0]


class Caller:
    """Code of a user's: calls once, and keeps what came of it."""

    def __init__(self, call: Callable[[], list[int]]) -> None:
        self._call = call
        self.found: list[int] | None = None
        self.error: Exception | None = None
        self._is_called = False

    def __call__(self) -> None:
        if self._is_called:  # the hook is run by the inner text, too
            return
        self._is_called = True
        try:
            self.found = self._call()
        except (RuntimeError, ValueError) as error:
            self.error = error

    def processor(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self()
        return scores

    def criterion(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self()
        return torch.zeros(len(ids), dtype=torch.bool)

    def stop(self, text: Any) -> bool:
        self()
        return False

    def prompts(self) -> Iterator[list[int]]:
        """Yield prompts, and call while the first one's text is under way."""
        yield PROMPT
        self()
        yield OTHER


class Streamer(BaseStreamer):
    def __init__(self, put: Callable[[], None], end: Callable[[], None]) -> None:
        self._put, self._end = put, end

    def put(self, value: torch.Tensor) -> None:
        self._put()

    def end(self) -> None:
        self._end()


class Outer:
    """A text of some kind that runs a user's code at some place."""

    def __init__(self, kind: str, model: Any) -> None:
        self.kind, self.model = kind, model
        self.is_transformers = kind.startswith(("accelerated", "callable"))
        self.decode = speculative("recycling") if kind == "callable" else None
        if kind.startswith("accelerated"):
            accelerate(model, method="recycling")
        self.decoder = SpeculativeDecoder(model, None, "recycling")
        self.words: dict[str, Any] = {"max_new_tokens": NUM_TOKENS}

    def text(self, prompt: list[int], **options: Any) -> list[int]:
        if not self.is_transformers:
            return self.decoder.generate(prompt, **self.words, **options).token_ids
        if self.decode is not None:
            options["custom_generate"] = self.decode
        return ask(self.model.generate, prompt, **options)[0]

    def inner(self, inner: str, other: Any) -> list[int]:
        if inner == "the same":
            return self.text(OTHER)
        if inner == "session":
            return self.decoder.session().generate(OTHER, **self.words).token_ids
        model = other if inner == "another accelerated model" else self.model
        generate = other.generate if model is other else type(model).generate.__get__(model)
        return ask(generate, OTHER)[0]

    def run(self, place: str, user: Caller) -> list[list[int]]:
        """Return the tokens of all texts."""
        decoder, words = self.decoder, dict(self.words)
        handle = self.model.model.layers[0].register_forward_hook(lambda *_: user())
        if place != "hook":
            handle.remove()
        try:
            if place == "processor":
                words["logits_processor" if self.is_transformers else "logits_processors"] = [
                    user.processor
                ]
            if place == "criterion":
                words["stopping_criteria"] = [user.criterion]
            if place in ("put", "end"):
                calls = {"put": lambda: None, "end": lambda: None, place: user}
                words["streamer"] = Streamer(**calls)
            if self.kind == "accelerated batch":
                return ask(self.model.generate, PROMPT, PROMPT[::-1], **words)
            if self.is_transformers:
                return [self.text(PROMPT, **words)]
            if self.kind == "generate":
                return [decoder.generate(PROMPT, **words).token_ids]
            if self.kind == "generate_all":
                return [one.token_ids for one in decoder.generate_all([PROMPT, OTHER], **words)]
            if self.kind == "as_completed":
                prompts: Any = [PROMPT, OTHER]
                words["max_new_tokens"] = [NUM_TOKENS, 2 * NUM_TOKENS]
                if place == "prompts":
                    prompts, words["max_new_tokens"] = user.prompts(), 2 * NUM_TOKENS
                found = {}
                for index, one in decoder.as_completed(prompts, **words):
                    found[index] = one.token_ids[:NUM_TOKENS]
                    if place == "loop":
                        user()
                return [found[0], found[1]]
            steps: Any
            if self.kind == "steps":
                stop = user.stop if place == "stop" else None
                steps = decoder.steps(PROMPT, stop=stop, **words)
            else:
                steps = decoder.stream(PROMPT, **words)
            tokens = []
            for step in steps:
                tokens += step.tokens if self.kind == "steps" else step.token_ids
                if place == "loop":
                    user()
            return [tokens]
        finally:
            handle.remove()

    @property
    def prompts(self) -> list[list[int]]:
        if self.kind == "accelerated batch":
            return [PROMPT, PROMPT[::-1]]
        return [PROMPT, OTHER] if self.kind in ("as_completed", "generate_all") else [PROMPT]


@cache
def outer_of(find: Callable[[], Any], kind: str) -> Outer:
    return Outer(kind, copy.deepcopy(find()))


@cache
def accelerated(find: Callable[[], Any]) -> Any:
    return accelerate(copy.deepcopy(find()), method="pld")


def is_refused(kind: str, place: str, inner: str) -> bool:
    """Whether an inner call is refused; else it gets its text."""
    if inner in ("another accelerated model", "plain model"):
        return False
    if place == "hook" and inner == "session":
        return True
    return inner == "the same" and not kind.startswith("accelerated") and place != "loop"


def check(find: Callable[[], Any], kind: str, place: str, inner: str) -> None:
    outer, other = outer_of(find, kind), accelerated(find)
    assert outer.text(THIRD) == expected(find, tuple(THIRD))
    user = Caller(lambda: outer.inner(inner, other))
    is_replaced = place == "loop" and inner == "the same"  # as in a notebook
    if is_replaced:
        with pytest.raises(RuntimeError, match="after another was begun"):
            outer.run(place, user)
    else:
        texts = outer.run(place, user)
        assert texts == [expected(find, tuple(prompt)) for prompt in outer.prompts]
    if is_refused(kind, place, inner):
        assert "within another text or a pass" in str(user.error) and "allowed: " in str(user.error)
        assert "\n" not in str(user.error)
    else:
        assert user.error is None
        assert user.found == expected(find, tuple(OTHER))
    assert outer.text(THIRD) == expected(find, tuple(THIRD))
    assert not any("forward" in vars(module) for module in outer.model.modules())
    assert not outer.decoder.target.lock.is_mine


@pytest.mark.parametrize(("kind", "place", "inner"), CASES)
def test_a_text_within_a_text(kind: str, place: str, inner: str) -> None:
    check(tiny, kind, place, inner)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("kind", ["generate", "accelerated"])
def test_a_hooks_call_computes_with_the_models_own_functions(kind: str, inner: str) -> None:
    check(demo, kind, "hook", inner)
