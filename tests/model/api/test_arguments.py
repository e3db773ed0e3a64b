"""What is given to a decoder in another library's way, or is no model: one line that says what to do.

Run: pytest tests/model/api/test_arguments.py
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from model import SpeculativeDecoder, TokenRecycling
from model.api.generate_arguments import BY_NAME
from model.api.loading import models as loading
from model.api.text_options import TextOptions

DEMO = Path(__file__).resolve().parents[3] / "data/demo/model"
PROMPT = "USER: Tell me about the sea. ASSISTANT:"


@lru_cache(maxsize=1)
def demo() -> SpeculativeDecoder:
    """The demo model with prompt lookup."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return SpeculativeDecoder(model.eval(), AutoTokenizer.from_pretrained(DEMO), "pld")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("do_sample", "temperature: above 0 samples"),
        ("max_length", "max_new_tokens"),
        ("max_tokens", "max_new_tokens"),
        ("eos_token_id", "stop_token_ids"),
        ("stopping_criteria", "max_time or cancel"),
        ("num_return_sequences", r"generate_all\(prompts, n="),
        ("enable_thinking", "chat_template_kwargs"),
        ("streamer", r"stream\(prompt, \.\.\.\)"),
        ("no_repeat_ngram_size", "logits_processors"),
        ("top_h", "from model import accelerate"),
        ("generation_config", "from model import accelerate"),
        ("num_beams", "from model import accelerate"),
        ("input_ids", r"without \*\*$"),
        ("attention_mask", r"without \*\*$"),
    ],
)
def test_another_librarys_argument_says_what_does_it_here(name: str, says: str) -> None:
    for function in (demo().generate, demo().stream):
        pattern = f"^{name}: not an argument of decoder.{function.__name__}; allowed: .*{says}"
        with pytest.raises(TypeError, match=pattern) as error:
            function(**{name: 1})
        assert "\n" not in str(error.value)


def test_every_argument_of_transformers_and_any_other_name_is_refused() -> None:
    own = {field.name for field in fields(TextOptions)}
    for name in BY_NAME.keys() - own:
        with pytest.raises(
            TypeError, match=f"^{name}: not an argument of decoder.generate; allowed: "
        ):
            demo().generate(PROMPT, **{name: None})
    with pytest.raises(TypeError, match=r"got 'max_new_token'; .*did you mean max_new_tokens"):
        demo().generate(PROMPT, max_new_token=5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"device": "cuda"}, "^device: not an argument of from_pretrained; allowed: device_map"),
        ({"torch_dtype": torch.float32}, "^torch_dtype: .*; allowed: dtype$"),
        ({"dtype": "fp32"}, "^dtype: got 'fp32'; allowed: auto, float32, "),
        ({"dtype": torch.int8}, "^dtype: got torch.int8; allowed: auto, float32, "),
        ({"output_id_top": 16}, "'output_id_top'; allowed: .*; did you mean output_id_topk"),
        ({"revison": "main"}, "'revison'; allowed: .*; did you mean revision"),
    ],
)
def test_a_word_that_nothing_takes_is_refused_before_the_weights_load(
    words: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "read_weights", None)
    with pytest.raises(ValueError, match=says):
        TokenRecycling.from_pretrained(DEMO, **words)


def test_settings_of_the_checkpoint_go_to_transformers() -> None:
    words = {"attn_implementation": "eager", "max_position_embeddings": 600, "revision": "main"}
    decoder = SpeculativeDecoder.from_pretrained(DEMO, "pld", **words)
    config = decoder.target.model.config
    assert (config._attn_implementation, config.max_position_embeddings) == ("eager", 600)


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (lambda model, _: str(DEMO), r"got '.*'; .* or SpeculativeDecoder.from_pretrained"),
        (lambda model, _: DEMO, "or SpeculativeDecoder.from_pretrained"),
        (lambda model, _: None, "got a NoneType; "),
        (lambda model, tokenizer: tokenizer, "the tokenizer is the second argument"),
        (lambda model, _: torch.nn.DataParallel(model), "DataParallel; .* its .module"),
        (
            lambda model, tokenizer: pipeline("text-generation", model, tokenizer=tokenizer),
            "TextGenerationPipeline; .* its .model and its .tokenizer",
        ),
    ],
)
def test_what_is_no_model_says_what_to_give(wrap: Any, says: str) -> None:
    model, tokenizer = demo().target.model, demo().tokenizer
    with pytest.raises(ValueError, match=f"^model: .*{says}"):
        SpeculativeDecoder(wrap(model, tokenizer))
    with pytest.raises(ValueError, match=r"^tokenizer: got 'pld'; .* a method is named by method="):
        SpeculativeDecoder(model, "pld")


def ids_of_prompt() -> list[int]:
    """Token ids of a prompt."""
    return list(demo().tokenizer(PROMPT).input_ids)


@pytest.mark.parametrize(
    "form",
    [
        np.array,
        lambda ids: np.array([ids]),
        lambda ids: list(np.array(ids)),
        lambda ids: [np.array(ids)],
        lambda ids: list(torch.tensor(ids)),
        lambda ids: demo().tokenizer(PROMPT, return_tensors="np"),
        lambda ids: {"input_ids": [[0, *ids]], "attention_mask": [[False, *(True for _ in ids)]]},
    ],
)
def test_tokens_come_from_numpy_too(form: Any) -> None:
    ids = ids_of_prompt()
    output = demo().generate(form(ids), max_new_tokens=2)
    assert output.sequences[0].tolist() == ids + output.token_ids


@pytest.mark.parametrize(
    "prompt",
    [[True, 3], np.array([True]), torch.tensor([True, False]), [1.0, 2.0], torch.tensor([1.5])],
)
def test_what_is_no_integer_is_no_token(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompt: got (True|1\.[05]) where an integer belongs; "):
        demo().generate(prompt)


def test_content_of_messages_comes_in_parts_of_text() -> None:
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "about the sea."}]
    outputs = [
        demo().generate([{"role": "user", "content": content}], max_new_tokens=2)
        for content in (parts, "Tell me about the sea.")
    ]
    assert torch.equal(*(output.sequences for output in outputs))
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "text"):
        with pytest.raises(ValueError, match=r"^prompt: got a content part of type .*; allowed: "):
            demo().generate([{"role": "user", "content": [*parts, part]}])


@pytest.mark.parametrize("given", [3, [3], lambda ids, scores: scores])
def test_processors_are_a_list_of_functions(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^logits_processors: got .*; allowed: a list of func"):
        demo().stream(PROMPT, logits_processors=given)
