"""Grammars and predictions: texts obey the one, are never changed by the other, and both are drafted.

Run: pytest tests/model/api/test_expected.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from transformers import LogitsProcessorList

from model.api.expected import MOST_GUESSED, Grammar, Prediction
from tests.model.api.test_decoder import decoder_for, demo

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Berlin", "Paris", "Rome"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
LARK = 'start: "The answer is " ("yes" | "no") "."'
PROMPTS = ["A person: ", "Tell me about the sea. ", "def add(a, b):"]
METHODS = ["vanilla", "recycling", "hybrid", "suffix", "pld"]
DRAWN = {"temperature": 0.9, "seed": 5}


def plain_generate(prompt: str, source: Any, limit: int) -> list[int]:
    """Return the tokens of Hugging Face's `generate` under a grammar."""
    model, tokenizer = demo()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    ends = [model.generation_config.eos_token_id]
    grammar = Grammar(source, tokenizer, model.config.vocab_size, ends).of_text(ids.shape[1])
    out = model.generate(
        ids, do_sample=False, max_new_tokens=limit, logits_processor=LogitsProcessorList([grammar])
    )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("source", [PERSON, LARK])
def test_texts_obey_a_grammar_and_are_those_of_plain_decoding(method: str, source: Any) -> None:
    decoder, plain = decoder_for(method, *demo()), decoder_for("vanilla", *demo())
    words: dict[str, Any] = {"grammar": source, "max_new_tokens": 60}
    for prompt in PROMPTS:
        greedy = decoder.generate(prompt, **words)
        assert greedy.token_ids == plain_generate(prompt, source, 60)
        drawn = decoder.generate(prompt, **words, **DRAWN)
        assert drawn.token_ids == plain.generate(prompt, **words, **DRAWN).token_ids
        for output in (greedy, drawn):
            assert output.stop_reason == "eos"
            if source is LARK:
                assert output.text in ("The answer is yes.", "The answer is no.")
            else:
                assert json.loads(output.text)["city"] in ("Berlin", "Paris", "Rome")
    many = decoder.generate_all(PROMPTS, batch_size=2, **words)
    assert [one.token_ids for one in many] == [
        plain.generate(prompt, **words).token_ids for prompt in PROMPTS
    ]


def test_what_must_follow_is_drafted_by_the_hybrid() -> None:
    steps = {}
    for method in ("hybrid", "suffix"):
        decoder = decoder_for(method, *demo())
        output = decoder.generate(PROMPTS[0], grammar=PERSON, max_new_tokens=60, **DRAWN)
        steps[method] = len(output.steps)
    assert steps["hybrid"] < steps["suffix"] <= len(output.token_ids)


@pytest.mark.parametrize("method", METHODS)
def test_a_prediction_changes_no_text_and_its_edits_are_followed(method: str) -> None:
    text = decoder_for("vanilla", *demo()).generate(PROMPTS[1], max_new_tokens=90)
    ids = text.token_ids
    edited = [*ids[:20], *ids[25:50], 7, 8, 9, *ids[50:]]
    for prediction in (text.text, ids, edited, [3, 3, 3], ""):
        decoder = decoder_for(method, *demo())
        output = decoder.generate(PROMPTS[1], max_new_tokens=90, prediction=prediction)
        assert output.token_ids == ids
        if method == "hybrid" and prediction is ids:
            assert len(output.steps) <= 6
        if method == "hybrid" and prediction is edited:
            assert len(output.steps) <= 20


def test_a_prediction_of_a_drawn_text_is_followed() -> None:
    plain, hybrid = (decoder_for(method, *demo()) for method in ("vanilla", "hybrid"))
    drawn = plain.generate(PROMPTS[1], max_new_tokens=40, **DRAWN)
    again = hybrid.generate(PROMPTS[1], max_new_tokens=40, prediction=drawn.token_ids, **DRAWN)
    assert again.token_ids == drawn.token_ids and len(again.steps) < 10


def test_the_place_in_a_prediction() -> None:
    prediction = Prediction([1, 2, 3, 4, 5, 1, 2, 3, 6, 7], num_prompt=2)
    text = [9, 9]
    assert list(prediction.guesses(text)) == [1, 2, 3, 4, 5, 1, 2, 3, 6, 7]
    text += [1, 2]
    assert prediction.guesses(text)[0] == 3
    text += [8]  # inserted
    assert list(prediction.guesses(text)) == []
    text += [1, 2, 3]  # both places follow; the first one ahead
    assert list(prediction.guesses(text)) == [4, 5, 1, 2, 3, 6, 7]
    text += [6]  # left out what stands between
    assert list(prediction.guesses(text)) == [7]
    text += [1, 2, 3]  # none is ahead
    assert list(prediction.guesses(text)) == [4, 5, 1, 2, 3, 6, 7]
    long = Prediction(range(100), num_prompt=0)
    assert len(long.guesses([])) == MOST_GUESSED


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"grammar": 3}, "grammar: got 3; allowed: a JSON schema"),
        ({"grammar": {"type": "nonsense"}}, "grammar: .*nonsense.*; allowed: a JSON schema"),
        ({"grammar": "no grammar"}, "grammar: "),
        ({"grammar": PERSON, "min_new_tokens": 3}, "min_new_tokens: got 3; allowed: 0, with a gr"),
        ({"grammar": PERSON, "ignore_eos": True}, "grammar: got it .* with ignore_eos"),
        ({"prediction": 3}, "prediction: got 3; allowed: text"),
        ({"prediction": [-1]}, "prediction: got -1"),
    ],
)
def test_what_is_no_grammar_or_prediction_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decoder_for("pld", *demo()).generate("a", **words)


def test_without_the_library_a_grammar_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="grammar: needs the package llguidance; install it"):
        decoder_for("pld", *demo()).generate("a", grammar=PERSON)


def test_the_place_in_a_grammar_is_that_of_the_prefix() -> None:
    model, tokenizer = demo()
    ends = [model.generation_config.eos_token_id]
    size = model.config.vocab_size
    grammar = Grammar(LARK, tokenizer, size, ends).of_text(1)
    yes, no = (tokenizer("The answer is " + word).input_ids for word in ("yes", "no"))
    text = decoder_for("vanilla", model, tokenizer).generate("a", grammar=LARK).token_ids
    scores = torch.zeros(1, size)
    first = grammar(torch.tensor([[5]]), scores).isfinite()
    ended = grammar(torch.tensor([[5, *text[:-1]]]), scores).isfinite()
    assert ended.nonzero()[:, 1].tolist() == ends and not torch.equal(first, ended)
    assert torch.equal(grammar(torch.tensor([[5]]), scores).isfinite(), first)
    assert yes != no and scores.abs().sum() == 0, "scores are not changed in place"
