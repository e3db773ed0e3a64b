"""`accelerate`: the model's own `generate`, with drafts, for all that transformers' takes.

`test_accelerate_laws.py` tests that tokens equal those of `generate` under about a hundred option sets.

Run: pytest tests/model/api/test_accelerate.py
"""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    TextIteratorStreamer,
    pipeline,
)

from model.api.accelerate import (
    AcceleratedGenerate,
    Speculative,
    accelerate,
    accelerated,
    recycling,
    restore,
)
from model.api.generate_arguments import UnsupportedCallError
from tests.hang import HANG
from tests.model.api.test_custom_generate import Pieces
from tests.model.api.test_decoder import DEMO, PROMPT
from tests.model.decoded import known


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, Any]:
    """The demo model in float32, which no other file changes, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture
def model(loaded: tuple[PreTrainedModel, Any]) -> Iterator[PreTrainedModel]:
    """The model as it was loaded; it is restored after the test."""
    network, _ = loaded
    config = copy.deepcopy(network.generation_config)
    yield network
    network.generation_config = config
    restore(network.eval())


@pytest.fixture
def tokenizer(loaded: tuple[PreTrainedModel, Any]) -> Any:
    """The model's tokenizer."""
    return loaded[1]


@pytest.fixture
def inputs(tokenizer: Any) -> dict[str, torch.Tensor]:
    """A prompt and a limit."""
    read = tokenizer(PROMPT, return_tensors="pt")
    return {name: read[name] for name in ("input_ids", "attention_mask")} | {"max_new_tokens": 30}


def texts_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of `accelerate`."""
    return [record.message for record in caplog.records if record.name.startswith("model.api")]


def test_generate_has_drafts_until_it_is_restored(
    model: PreTrainedModel, inputs: dict[str, Any]
) -> None:
    before = dict(model.__dict__)
    plain = model.generate(**inputs)
    assert accelerate(model) is model
    assert torch.equal(model.generate(**inputs), plain)
    assert torch.equal(model.generate(inputs["input_ids"], max_new_tokens=30), plain)
    num_new = plain.shape[1] - inputs["input_ids"].shape[1]
    assert sum(model.generate.accept_lengths) == num_new > len(model.generate.steps)
    assert "speculative('hybrid'), on a LlamaForCausalLM" in repr(model.generate)
    assert "streamer" in inspect.signature(model.generate).parameters
    assert restore(model) is model
    assert model.__dict__.keys() == before.keys()
    assert torch.equal(model.generate(**inputs), plain)
    restore(model)  # a second time does nothing
    with pytest.raises(ValueError, match=r"^model: is not accelerated; allowed: after accelerate"):
        accelerated(model)


def test_a_second_call_replaces_method_and_options(
    model: PreTrainedModel, inputs: dict[str, Any]
) -> None:
    plain = model.generate(**inputs)
    accelerate(model)
    accelerate(model, method="pld", num_pred_tokens=4)
    assert "<speculative('pld', num_pred_tokens=4), on a" in repr(model.generate)
    assert torch.equal(model.generate(**inputs), plain)
    restore(model)
    assert "generate" not in model.__dict__


def test_a_generate_that_was_replaced_is_not_overwritten(model: PreTrainedModel) -> None:
    model.generate = lambda **words: None
    try:
        with pytest.raises(ValueError, match=r"its generate was replaced; .*`del model.generate`"):
            accelerate(model)
    finally:
        del model.generate


def test_what_was_learned_is_saved_and_loaded(
    model: PreTrainedModel, inputs: dict[str, Any], tmp_path: Path
) -> None:
    accelerate(model)
    model.generate(**inputs)
    first = len(model.generate.steps)
    accelerated(model).save_memory(tmp_path / "matrix.safetensors")
    model.generate.reset()
    model.generate.load_memory(tmp_path / "matrix.safetensors")
    model.generate(**inputs)
    assert len(model.generate.steps) < first


def test_copies_are_accelerated_and_begin_anew(
    model: PreTrainedModel, inputs: dict[str, Any], tmp_path: Path
) -> None:
    plain = model.generate(**inputs)
    accelerate(model)
    model.generate(**inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin.generate, AcceleratedGenerate)
        assert twin.generate.decoder is None
        with torch.no_grad():
            twin.lm_head.weight.mul_(-1)
        found = twin.generate(**inputs)
        assert torch.equal(restore(twin).generate(**inputs), found)
        assert not torch.equal(found, plain)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(again.generate(**inputs), plain)


# Streams


def test_a_streamer_gets_what_generate_gives_it(
    model: PreTrainedModel, inputs: dict[str, Any]
) -> None:
    streamers = Pieces(), Pieces(), Pieces()
    model.generate(**inputs, streamer=streamers[0])
    model.generate(**inputs, streamer=streamers[1], custom_generate=recycling())
    accelerate(model).generate(**inputs, streamer=streamers[2])
    assert streamers[0].pieces == streamers[1].pieces == streamers[2].pieces
    assert all(streamer.has_ended for streamer in streamers)


@pytest.mark.parametrize("way", ["accelerate", "custom_generate"])
def test_a_streamer_is_read_in_another_thread(
    way: str, model: PreTrainedModel, tokenizer: Any, inputs: dict[str, Any]
) -> None:
    expected = tokenizer.decode(model.generate(**inputs)[0, inputs["input_ids"].shape[1] :])
    words = {"custom_generate": recycling()} if way == "custom_generate" else {}
    if not words:
        accelerate(model)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=HANG)
    thread = Thread(target=model.generate, kwargs={**inputs, **words, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == expected
    thread.join()


@pytest.mark.parametrize("way", ["accelerate", "custom_generate"])
def test_a_pipeline_streams_and_stops(way: str, model: PreTrainedModel, tokenizer: Any) -> None:
    options = {"max_new_tokens": 30, "do_sample": False, "return_full_text": False}
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    expected = pipe(PROMPT, **options)[0]["generated_text"]
    stop = {"stop_strings": [expected[8:12]], "tokenizer": tokenizer}
    stopped = pipe(PROMPT, **options, **stop)[0]["generated_text"]
    words = {"custom_generate": recycling(tokenizer)} if way == "custom_generate" else {}
    if not words:
        accelerate(model)
    streamer = TextIteratorStreamer(
        tokenizer, skip_prompt=True, timeout=HANG, skip_special_tokens=True
    )
    found: list[Any] = []
    thread = Thread(
        target=lambda: found.append(pipe(PROMPT, **options, **words, streamer=streamer))
    )
    thread.start()
    assert "".join(streamer).strip() == expected.strip()
    thread.join()
    assert found[0][0]["generated_text"] == expected
    assert pipe(PROMPT, **options, **stop, **words)[0]["generated_text"] == stopped != expected


class Failing(LogitsProcessor):
    """Fails after some tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores as they are."""
        if input_ids.shape[1] >= self.length:
            raise RuntimeError("failed in a processor")
        return scores


@pytest.mark.parametrize("way", ["accelerate", "streamer", "step_streamer", "left to transformers"])
def test_a_streamer_is_ended_when_decoding_fails(
    way: str, model: PreTrainedModel, tokenizer: Any, inputs: dict[str, Any]
) -> None:
    words: dict[str, Any] = {"logits_processor": [Failing(inputs["input_ids"].shape[1] + 5)]}
    name = "step_streamer" if way == "step_streamer" else "streamer"
    if way in ("accelerate", "left to transformers"):
        accelerate(model)
    else:
        words["custom_generate"] = recycling()
    if way == "left to transformers":
        words["use_cache"] = False
    words[name] = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=HANG)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            model.generate(**inputs, **words)
        except RuntimeError as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    assert len("".join(words[name])) < 60
    thread.join()
    assert str(errors[0]) == "failed in a processor"
    del words["logits_processor"]
    words[name] = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=HANG)
    model.generate(**inputs, **words)  # the decoder is free again
    assert "".join(words[name])


def test_a_refused_call_ends_its_streamer(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    for words in ({"custom_generate": recycling()}, {}):
        if not words:
            accelerate(model, fallback=False)
        streamer = Pieces()
        with pytest.raises(UnsupportedCallError, match="use_cache: got False"):
            model.generate(**inputs, **words, use_cache=False, streamer=streamer)
        assert streamer.has_ended


def test_two_streamers_are_refused(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    words = {"streamer": Pieces(), "step_streamer": Pieces(), "custom_generate": recycling()}
    with pytest.raises(ValueError, match="streamer, step_streamer: got both; allowed: one"):
        model.generate(**inputs, **words)


# What is left to transformers


def elsewhere(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Return calls that cannot be decoded with drafts, by the argument that the warning names."""
    two = {"input_ids": torch.cat((ids, ids)), "attention_mask": torch.ones(2, ids.shape[1]).long()}
    hole = torch.ones_like(ids)
    hole[0, 2] = 0
    embedded = model.get_input_embeddings()(ids)
    return {
        "num_beams": {"num_beams": 2},
        "num_return_sequences": {"num_return_sequences": 2, "do_sample": True},
        "do_sample": two | {"do_sample": True},
        "assistant_model": {"assistant_model": copy.deepcopy(restore(model))},
        "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
        "use_cache": {"use_cache": False},
        "past_key_values": {"past_key_values": DynamicCache()},
        "attention_mask": {"attention_mask": hole},
        "position_ids": {"position_ids": torch.arange(ids.shape[1])[None] + 3},
        "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
        "guidance_scale": {"guidance_scale": 1.5},
        "inputs_embeds": {"inputs_embeds": embedded},
        "max_length": {"max_new_tokens": model.config.max_position_embeddings},
    }


def tokens_of(output: Any) -> list[list[int]]:
    """Return the tokens of what `generate` returns."""
    return getattr(output, "sequences", output).tolist()


NAMES = [
    *("num_beams", "num_return_sequences", "do_sample", "assistant_model", "use_cache"),
    *("prompt_lookup_num_tokens", "past_key_values", "attention_mask", "position_ids"),
    *("output_attentions", "guidance_scale", "inputs_embeds", "max_length"),
]


@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_drafts_is_left_to_transformers_with_one_warning(
    name: str, model: PreTrainedModel, inputs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def call() -> dict[str, Any]:
        return inputs | elsewhere(model, inputs["input_ids"])[name]

    def run(words: dict[str, Any]) -> list[list[int]]:
        torch.manual_seed(0)
        return tokens_of(model.generate(**words))

    calls = [call(), call(), call(), call()]
    expected = run(calls[0])
    accelerate(model)
    with caplog.at_level(logging.WARNING, "model.api"):
        assert run(calls[1]) == expected and run(calls[2]) == expected
    (warning,) = texts_of(caplog)
    assert warning.startswith(f"accelerate: {name}: got ")
    assert warning.endswith("such calls are left to transformers' own generate, without drafts")
    assert "generation_config" not in warning
    accelerate(model, fallback=False)
    with pytest.raises(UnsupportedCallError, match=rf"^{name}: got .*; allowed: "):
        run(calls[3])


def test_each_kind_is_warned_of(
    model: PreTrainedModel, inputs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    accelerate(model)
    for words in ({"num_beams": 2}, {"num_beams": 3}, {"use_cache": False}):
        model.generate(**inputs, **words)
    assert [text.split(":")[1].strip() for text in texts_of(caplog)] == ["num_beams", "use_cache"]


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}])
@pytest.mark.parametrize("way", ["accelerate", "custom_generate"])
def test_a_setting_of_the_checkpoint_is_said_to_be_one(
    way: str, settings: dict[str, Any], model: PreTrainedModel, inputs: dict[str, Any]
) -> None:
    model.generation_config = GenerationConfig(**settings, pad_token_id=0)
    (name,) = settings
    words = {"custom_generate": recycling()} if way == "custom_generate" else {}
    if not words:
        accelerate(model, fallback=False)
    theirs = rf"{name}: got \w+ \(from the model's generation_config, not from the call\); allowed"
    with pytest.raises(UnsupportedCallError, match=theirs):
        model.generate(**inputs, **words)
    with pytest.raises(UnsupportedCallError, match=rf"{name}: got \w+; allowed"):
        model.generate(**inputs, **words, **settings)


@pytest.mark.parametrize("way", ["accelerate", "custom_generate"])
def test_a_checkpoint_that_turns_its_cache_off_is_decoded(
    way: str, model: PreTrainedModel, inputs: dict[str, Any]
) -> None:
    """As MPT's do, and those that were saved after training with gradient checkpointing."""
    model.generation_config = GenerationConfig(use_cache=False, pad_token_id=0)
    expected = model.generate(**inputs)
    words = {"custom_generate": recycling()} if way == "custom_generate" else {}
    if not words:
        accelerate(model, fallback=False)
    assert torch.equal(model.generate(**inputs, **words), expected)


def test_stop_strings_of_any_origin_hold(
    model: PreTrainedModel, tokenizer: Any, inputs: dict[str, Any]
) -> None:
    start = inputs["input_ids"].shape[1]
    stop = tokenizer.decode(model.generate(**inputs)[0, start:])[8:12]
    expected = model.generate(**inputs, stop_strings=stop, tokenizer=tokenizer)
    config = GenerationConfig(max_new_tokens=30, stop_strings=[stop])
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    accelerate(model, tokenizer)
    assert torch.equal(model.generate(**inputs, stop_strings=stop), expected)
    assert torch.equal(model.generate(**text, generation_config=config), expected)
    assert config.stop_strings == [stop]
    model.generation_config.stop_strings = [stop]
    assert torch.equal(model.generate(**inputs), expected)
    assert model.generate.steps[-1].stop_reason == "criteria"
    accelerate(model)
    assert torch.equal(model.generate(**inputs, tokenizer=tokenizer), expected)
    with pytest.raises(ValueError, match=r"without a tokenizer; give tokenizer= to accelerate"):
        model.generate(**inputs)


def test_a_custom_generate_of_the_call_runs_instead(
    model: PreTrainedModel, inputs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    accelerate(model)
    decode = recycling()
    model.generate(**inputs, custom_generate=decode)
    assert decode.steps and not model.generate.steps and not texts_of(caplog)


def test_a_custom_generate_that_is_none_is_as_if_not_given(
    model: PreTrainedModel, inputs: dict[str, Any]
) -> None:
    plain = model.generate(**inputs, custom_generate=None)
    accelerate(model, fallback=False)
    assert torch.equal(model.generate(**inputs, custom_generate=None), plain)


def test_processors_and_criteria_are_asked_as_often(
    model: PreTrainedModel, inputs: dict[str, Any]
) -> None:
    class Asked(StoppingCriteria):
        def __init__(self) -> None:
            self.lengths: list[int] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.lengths.append(input_ids.shape[1])
            return torch.zeros(len(input_ids), dtype=torch.bool)

    asked = Asked(), Asked()
    model.generate(**inputs, stopping_criteria=[asked[0]])
    accelerate(model).generate(**inputs, stopping_criteria=[asked[1]])
    assert asked[0].lengths == asked[1].lengths


# The model


def test_a_model_in_training_mode_is_left_to_transformers(
    model: PreTrainedModel, inputs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain = model.generate(**inputs)
    accelerate(model)
    model.train()
    assert torch.equal(model.generate(**inputs), plain)
    assert "accelerate: model: is in training mode" in texts_of(caplog)[0]
    model.eval()
    assert torch.equal(model.generate(**inputs), plain)


def test_a_model_that_is_cast_is_tested_anew(caplog: pytest.LogCaptureFixture) -> None:
    network = accelerate(known("Llama, grouped heads").build())
    ids = torch.tensor([[5, 6, 7, 8]])
    words = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    network.generate(ids, **words)
    network.to(torch.float64)
    found = network.generate(ids, **words)
    assert "moved, cast or resized" in texts_of(caplog)[0]
    assert torch.equal(restore(network).generate(ids, **words), found)


def test_a_class_whose_generate_calls_no_callable_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = known("Llama, grouped heads").build()

    def own(self: Any, inputs: torch.Tensor, **words: Any) -> torch.Tensor:
        return inputs

    monkeypatch.setattr(type(network), "generate", own, raising=False)
    accelerate(network)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(network.generate(ids), ids)
    assert (
        "generate: got a generate of LlamaForCausalLM's own, which does not call"
        in texts_of(caplog)[0]
    )


def test_adapters_of_peft_count(inputs: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(known("Llama, grouped heads").build(), config).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    words = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    expected = model.generate(**words)
    assert accelerate(model, fallback=False) is model
    assert torch.equal(model.generate(**words), expected)
    assert sum(model.get_base_model().generate.accept_lengths) == 12
    restore(model)
    assert "generate" not in model.get_base_model().__dict__


def test_a_compiled_model_is_accelerated(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    plain = model.generate(**inputs)
    compiled = accelerate(torch.compile(model, backend="eager"))
    assert torch.equal(compiled.generate(**inputs), plain)
    assert "generate" in model.__dict__
    restore(compiled)
    assert "generate" not in model.__dict__


def wrong_models(model: PreTrainedModel, tokenizer: Any) -> dict[str, tuple[Any, str]]:
    """Return what is no loaded model, and what the error says of it."""
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    return {
        "path": (
            "data/demo/model",
            r"model: got 'data/demo/model'; allowed: a loaded .*; such as Auto",
        ),
        "pipeline": (pipe, r"model: got a TextGenerationPipeline; .*; give its \.model"),
        "parallel": (
            torch.nn.DataParallel(model),
            r"model: got a DataParallel; .*give what it wraps, its \.mod",
        ),
        "layer": (
            torch.nn.Linear(2, 2),
            "model: got a Linear; allowed: a loaded causal LM of transformers",
        ),
        "base": (model.model, "model: got a LlamaModel, which has no generate; allowed: a loaded"),
        "nothing": (None, "model: got a NoneType; allowed: a loaded causal LM"),
    }


@pytest.mark.parametrize("kind", ["path", "pipeline", "parallel", "layer", "base", "nothing"])
def test_what_is_no_loaded_model_is_refused(
    kind: str, model: PreTrainedModel, tokenizer: Any
) -> None:
    given, message = wrong_models(model, tokenizer)[kind]
    for function in (accelerate, restore):
        with pytest.raises(ValueError, match=message):
            function(given)


def test_what_is_no_tokenizer_is_refused(model: PreTrainedModel) -> None:
    for function in (
        recycling,
        lambda one: accelerate(model, one),
        lambda one: Speculative("pld", one),
    ):
        with pytest.raises(ValueError, match=r"tokenizer: got a LlamaForCausalLM; .*accelerate\("):
            function(model)
        with pytest.raises(
            ValueError, match=r"tokenizer: got 'data/demo/model'; .*such as AutoTokenizer"
        ):
            function("data/demo/model")
    assert "generate" not in model.__dict__


def test_unknown_methods_and_options_are_said_at_once(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"method: got 'recycle'.*did you mean recycling"):
        accelerate(model, method="recycle")
    with pytest.raises(ValueError, match="option of recycling: got 'topk'"):
        accelerate(model, method="recycling", topk=3)
    assert "generate" not in model.__dict__
