"""Several prompts in one call of `generate`: tokens and padding are those of transformers' own, in float32.

Run: pytest tests/model/api/test_padded_batches.py
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
    TopKLogitsWarper,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation import logits_process

from model.api.accelerate import Speculative, accelerate, recycling, restore, speculative
from model.api.generate_arguments import UnsupportedCallError
from model.api.prepared_call import PROCESSORS, is_by_row
from tests.model.api.test_custom_generate import Pieces
from tests.model.api.test_decoder import demo
from tests.model.decoded import known, random_ids
from tests.model.families.family import VERSION
from tests.pairs import pairs
from tests.random_llama import random_llama

METHODS = ("recycling", "vanilla", "pld", "hybrid", "medusa")
FAMILIES = ["Llama, grouped heads", "Gemma 3 text", "GPT-2", "Mistral, sliding window", "Mamba"]
LENGTHS = (9, 3, 12, 1)
NUM_TOKENS = 9


def padded(lengths: tuple[int, ...] = LENGTHS, vocab_size: int = 64) -> dict[str, torch.Tensor]:
    """Return random prompts, padded on the left, with their mask."""
    size = max(lengths)
    rows = [random_ids(length, length, vocab_size) for length in lengths]
    ids = [[0] * (size - len(row)) + row for row in rows]
    mask = [[0] * (size - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "ends": {"eos_token_id": [*range(20)], "pad_token_id": 61},
    "ends that pad": {"eos_token_id": [*range(7, 27)], "pad_token_id": None},
    "least": {"eos_token_id": [*range(30)], "min_new_tokens": 4},
    "length": {"max_length": 15, "max_new_tokens": None, "min_length": 14, "eos_token_id": 5},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "forbidden": {"bad_words_ids": [[4], [9, 12]], "suppress_tokens": [*range(20, 40)]},
    "forced": {"eos_token_id": 3, "forced_eos_token_id": 3, "forced_bos_token_id": 8},
    "bias": {"sequence_bias": {(10,): 3.0, (11, 12): -8.0}, "renormalize_logits": True},
    "decay": {"eos_token_id": [5, 9], "exponential_decay_length_penalty": (2, 1.7)},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "own processor": {"logits_processor": [TopKLogitsWarper(5)], "repetition_penalty": 1.5},
    "time": {"max_time": 600.0, "eos_token_id": [*range(20)]},
}
if VERSION > (5, 20):  # older ones take one number for all rows
    of_part = RepetitionPenaltyLogitsProcessor(1.7, torch.tensor([1, 9, 3, 11]))
    OPTIONS["penalty of a part"] = {"logits_processor": [of_part]}


def tokens_of(
    model: PreTrainedModel, options: Mapping[str, Any], decode: Speculative | None = None
) -> list[list[int]]:
    """Return the tokens of `generate`, prompts and padding included."""
    words = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0} | dict(options)
    words = {name: value for name, value in words.items() if value is not None}
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    found = model.generate(**padded(vocab_size=vocab_size), **words, custom_generate=decode)
    return found.tolist()  # type: ignore[no-any-return]


@lru_cache
def llama() -> PreTrainedModel:
    """Return a random Llama."""
    return known(FAMILIES[0]).build()


@lru_cache
def expected(name: str) -> list[list[int]]:
    """Return what transformers' own generate gives under an option set."""
    return tokens_of(llama(), OPTIONS[name])


@lru_cache
def decoding(method: str) -> Speculative:
    """Return a method's callable."""
    from tests.model.api.test_custom_generate import method_of

    return method_of(method, llama())


@pytest.mark.parametrize(("name", "method"), pairs(list(OPTIONS), METHODS))
def test_rows_are_those_of_generate(name: str, method: str) -> None:
    decode = decoding(method)
    assert tokens_of(llama(), OPTIONS[name], decode) == expected(name)
    prompts = len(LENGTHS)
    assert sum(step.stop_reason is not None for step in decode.steps) == prompts
    if name == "greedy":
        assert sum(decode.accept_lengths) == prompts * NUM_TOKENS


def test_every_option_set_changes_the_rows_and_some_end_early() -> None:
    same = [name for name in OPTIONS if name != "greedy" and expected(name) == expected("greedy")]
    assert same == [], "an option without effect proves nothing"
    ends = [row[-1] for row in expected("ends")]
    assert 61 in ends and {*ends} != {61}, "some rows should be padded, and some not"


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families_give_what_generate_gives(family: str) -> None:
    """Mamba's texts cannot share passes: a callable decodes them in turn."""
    model = known(family).build()
    options = {"eos_token_id": [*range(12)]}
    decode = speculative("recycling")
    assert tokens_of(model, options, decode) == tokens_of(model, options)


def test_stop_strings_end_rows_by_themselves() -> None:
    model, tokenizer = demo()
    texts = [f"USER: Tell me about {topic}. ASSISTANT:" for topic in ("the sea", "rain", "a boat")]
    inputs = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    words = {"max_new_tokens": 20, "do_sample": False, "stop_strings": ["ing", "."]}
    plain = model.generate(**inputs, **words, tokenizer=tokenizer)
    found = model.generate(**inputs, **words, custom_generate=recycling(tokenizer))
    assert torch.equal(found, plain)
    assert (found[:, -1] == model.generation_config.pad_token_id).any(), "some should be shorter"


def test_an_output_holds_the_rows() -> None:
    found = llama().generate(
        **padded(), max_new_tokens=5, return_dict_in_generate=True, custom_generate=recycling()
    )
    assert found.sequences.shape == (len(LENGTHS), max(LENGTHS) + 5)
    assert found.scores is None and found.logits is None


def test_what_a_batch_learns_stays_for_the_next_call() -> None:
    decode = recycling()
    tokens_of(llama(), {}, decode)
    num_steps = len(decode.steps)
    tokens_of(llama(), {}, decode)
    assert len(decode.steps) < num_steps, "the second time it should know the texts"


class Never(StoppingCriteria):
    """Ends no text."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return False for each row [B]."""
        return torch.zeros(len(input_ids), dtype=torch.bool)


REFUSED: dict[str, dict[str, Any]] = {
    "do_sample": {"do_sample": True},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.3},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "logits_processor": {"logits_processor": [lambda ids, scores: scores]},
    "prefix": {"prefix_allowed_tokens_fn": lambda batch, ids: [5, 6]},
    "stopping_criteria": {"stopping_criteria": [Never()]},
    "strings without an end": {"stopping_criteria": "strings", "eos_token_id": None},
    "pad_token_id": {"eos_token_id": None, "pad_token_id": None},
    "streamer": {"streamer": Pieces},
}
NAMED = {"prefix": "logits_processor", "strings without an end": "stopping_criteria"}


def refused(name: str) -> dict[str, Any]:
    """Return the words of a call with several prompts that is refused."""
    words = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0} | REFUSED[name]
    if words.get("stopping_criteria") == "strings":
        words["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(demo()[1], ["a"])])
    return {
        key: value() if value is Pieces else value
        for key, value in words.items()
        if value is not None
    }


@pytest.mark.parametrize("name", REFUSED)
def test_what_rows_cannot_have_is_refused_and_works_with_one_prompt(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    if name in ("pad_token_id", "strings without an end"):
        monkeypatch.setattr(model.generation_config, "eos_token_id", None)
        monkeypatch.setattr(model.generation_config, "pad_token_id", None)
    argument = NAMED.get(name, name)
    with pytest.raises(
        UnsupportedCallError,
        match=rf"^{argument}: got .+ with 4 prompts; allowed: .+, or one prompt$",
    ):
        model.generate(**padded(), **refused(name), custom_generate=recycling())
    model.generate(**padded((5,)), **refused(name), custom_generate=recycling())


def test_masks_with_holes_or_without_a_text_are_refused() -> None:
    for row, place in ((0, 4), (2, slice(None))):
        inputs = padded()
        inputs["attention_mask"][row, place] = 0
        with pytest.raises(UnsupportedCallError, match=r"^attention_mask: got .*on the left"):
            llama().generate(**inputs, max_new_tokens=3, custom_generate=recycling())


def test_the_list_of_processors_names_classes_of_transformers() -> None:
    classes = [getattr(logits_process, name, None) for name in PROCESSORS]
    known_classes = [cls for cls in classes if cls is not None]
    assert len(known_classes) >= len(PROCESSORS) - 1, "one is new in transformers 5"
    assert is_by_row(TopKLogitsWarper(3))

    class Derived(TopKLogitsWarper):
        pass

    encoder = EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[1, 2]]))
    assert not any(map(is_by_row, (Derived(3), encoder, LogitsProcessorList())))


# accelerate


@pytest.fixture
def accelerated() -> Any:
    """A random Llama that is accelerated; refused calls are errors."""
    model = known(FAMILIES[0]).build()
    yield accelerate(model, method="recycling", fallback=False)
    restore(model)


@pytest.mark.parametrize("name", ["greedy", "ends", "penalties"])
def test_an_accelerated_model_decodes_batches(name: str, accelerated: PreTrainedModel) -> None:
    assert tokens_of(accelerated, OPTIONS[name]) == expected(name)
    assert len(accelerated.generate.steps) >= len(LENGTHS)


def test_a_pipeline_of_an_accelerated_model_decodes_batches() -> None:
    model, tokenizer = demo()
    texts = [f"USER: Tell me about {topic}. ASSISTANT:" for topic in ("the sea", "rain", "a boat")]
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False, "batch_size": 3}
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    plain = pipe(texts, **options)
    accelerate(model, tokenizer, method="recycling", fallback=False)
    try:
        assert pipe(texts, **options) == plain
        assert len(model.generate.steps) >= 3
    finally:
        restore(model)


def test_batches_of_a_model_that_reads_texts_in_turn_are_left_to_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = random_llama(64, seed=5, rope_scaling=rope)
    plain = tokens_of(model, {})
    accelerate(model, method="recycling")
    with caplog.at_level(logging.WARNING, "model.api"):
        assert tokens_of(model, {}) == plain
    (warning,) = [record.message for record in caplog.records if "accelerate" in record.message]
    assert warning.startswith("accelerate: input_ids: got shape [4, 12]; allowed: one prompt with")
    assert "depend on the longest text" in warning and "left to transformers' own" in warning


def test_a_streamer_for_one_text_is_refused_as_by_transformers(accelerated: Any) -> None:
    restore(accelerated)
    accelerate(accelerated, method="recycling")
    streamer = TextStreamer(demo()[1])
    with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
        accelerated.generate(**padded(), max_new_tokens=3, streamer=streamer)
