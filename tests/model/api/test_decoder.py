"""The library object: prompts in, text out, and state kept from prompt to prompt.

Run: pytest tests/model/api/test_decoder.py
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

import model as package
from model import SpeculativeDecoder, TokenRecycling
from model.api.accelerate import recycling
from model.backends.proofs.support import UnsupportedModelError
from model.methods import METHODS
from tests.model.decoded import known, random_ids, referee, required_options
from tests.pairs import pairs

DEMO = Path(__file__).resolve().parents[3] / "data/demo/model"
PROMPT = "USER: Tell me about the sea. ASSISTANT:"
LLAMA = "Llama, grouped heads"


@lru_cache(maxsize=1)
def demo() -> tuple[Any, Any]:
    """Return the demo model in float32, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(DEMO)


def decoder_for(method: str, model: Any, tokenizer: Any = None) -> SpeculativeDecoder:
    """Return a method on a model."""
    options = required_options(method, model.config)
    return SpeculativeDecoder(model, tokenizer, method, **options)


@pytest.mark.parametrize("method", METHODS)
def test_an_answer_is_that_of_generate_with_all_its_figures(method: str) -> None:
    model, tokenizer = demo()
    decoder = decoder_for(method, model, tokenizer)
    prompt_ids = tokenizer(PROMPT).input_ids
    expected = referee(decoder.target, prompt_ids, 20, eos_id=2)
    for _ in range(2):  # the second time with the first answer's memory and cache
        output = decoder.generate(PROMPT, max_new_tokens=20)
        assert output.token_ids == expected
        assert output.sequences.tolist() == [prompt_ids + expected]
        assert output.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert sum(output.accept_lengths) == len(expected)
        assert output.stop_reason == ("eos" if expected[-1] == 2 else "length")
        assert output.prefill_time > 0 and output.decode_time > 0
    if method == "recycling":
        assert max(output.accept_lengths) > 1, "nothing was ever accepted"


def test_from_pretrained_loads_model_and_tokenizer_with_the_options_of_a_method() -> None:
    decoder = SpeculativeDecoder.from_pretrained(
        DEMO, "recycling", torch.float32, output_id_topk=9, attn_implementation="eager"
    )
    assert decoder.target.dtype == torch.float32
    assert decoder.target.model.config._attn_implementation == "eager"
    assert decoder.drafter.memory()["adjacency"].shape == (8192, 9)
    assert TokenRecycling.from_pretrained(DEMO).target.dtype == torch.bfloat16, "the checkpoint's"


@pytest.mark.parametrize("kind", ["list", "row", "batch of one", "tokenizer's output", "padded"])
def test_a_prompt_comes_in_any_form(kind: str) -> None:
    model, tokenizer = demo()
    decoder = TokenRecycling(model, tokenizer)
    ids = tokenizer(PROMPT).input_ids
    rows = torch.tensor([[0, 0, *ids]])
    prompt = {
        "list": ids,
        "row": torch.tensor(ids),
        "batch of one": torch.tensor([ids]),
        "tokenizer's output": tokenizer(PROMPT, return_tensors="pt"),
        "padded": {"input_ids": rows, "attention_mask": (rows != 0).long()},
    }[kind]
    output = decoder.generate(prompt, max_new_tokens=5)
    assert output.sequences[0].tolist() == ids + output.token_ids
    assert output.token_ids == referee(decoder.target, ids, 5)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[1, 2], [3, 4]], "got 2 rows where an integer belongs"),
        ({"text": [1]}, r"got \['text'\]; allowed: text, chat messages, token ids"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 0]]}, "allowed: padding on the left"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "of another length"),
        (7, "got int; allowed"),
        ([], "got no token"),
        ([1, 8192], "got token 8192; allowed: 0 to 8191"),
        ([-1, 1], "got token -1"),
    ],
)
def test_a_prompt_of_another_form_is_one_clear_error(prompt: Any, message: str) -> None:
    decoder = TokenRecycling(*demo())
    with pytest.raises(ValueError, match=message):
        decoder.generate(prompt)


# All methods answer through one loop: every other one is sampled here, and the others stream below.
@pytest.mark.parametrize("method", list(METHODS)[::2])
def test_a_seed_gives_one_text_whatever_the_method(method: str) -> None:
    model, tokenizer = demo()
    options = {"max_new_tokens": 12, "temperature": 1.2, "top_k": 50, "top_p": 0.95}
    text, other = (
        decoder_for(method, model, tokenizer).generate(PROMPT, seed=seed, **options).text
        for seed in (4, 5)
    )
    assert plainly_sampled(4, **options) == text != other


@lru_cache
def plainly_sampled(seed: int, **options: Any) -> str:
    """Return a text of plain decoding."""
    return decoder_for("vanilla", *demo()).generate(PROMPT, seed=seed, **options).text


@pytest.mark.parametrize("method", METHODS)
def test_processors_hold_with_greedy_decoding(method: str) -> None:
    model = known(LLAMA).build()
    ids = torch.tensor([random_ids(10)])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, repetition_penalty=1.5
    )
    decoder = decoder_for(method, model)
    processors = [RepetitionPenaltyLogitsProcessor(1.5)]
    output = decoder.generate(ids, max_new_tokens=20, logits_processors=processors)
    assert torch.equal(output.sequences, expected)
    assert output.token_ids != decoder.generate(ids, max_new_tokens=20).token_ids
    assert output.text == "", "there is no tokenizer"


def test_processors_that_count_their_calls_need_sampling() -> None:
    model = known(LLAMA).build()
    ids = torch.tensor([random_ids(12)])
    guided = [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model, ids[:, -1:])]
    decoder = TokenRecycling(model)
    with pytest.raises(ValueError, match=r"^logits_processors: got a Unb.*a temperature above 0$"):
        decoder.generate(ids, max_new_tokens=4, logits_processors=guided)
    options = {"max_new_tokens": 12, "top_k": 50}
    torch.manual_seed(3)
    found = decoder.generate(ids, **options, temperature=1.0, logits_processors=guided)
    torch.manual_seed(3)
    mask = torch.ones_like(ids)
    expected = model.generate(
        ids, **options, attention_mask=mask, do_sample=True, guidance_scale=1.5
    )
    assert torch.equal(found.sequences, expected)


@pytest.mark.parametrize(("method", "begin"), pairs(METHODS, [5, 14]))
def test_a_stop_string_inside_an_accepted_run_ends_the_text_there(method: str, begin: int) -> None:
    model, tokenizer = demo()
    decoder = decoder_for(method, model, tokenizer)
    whole = decoder.generate(PROMPT, max_new_tokens=20)
    stop = whole.text[begin : begin + 4]
    output = decoder.generate(PROMPT, max_new_tokens=20, stop_strings=["@@@", stop])
    assert stop == output.stop_string and stop not in output.text
    assert stop in tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert whole.text.startswith(output.text + stop)
    shorter = tokenizer.decode(output.token_ids[:-1], skip_special_tokens=True)
    assert stop not in shorter, "it should have ended at the first token that completes it"
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert output.stop_reason == "criteria"
    as_text = decoder.generate(PROMPT, max_new_tokens=20, stop_strings=stop)
    assert as_text.token_ids == output.token_ids
    assert sum(output.accept_lengths) == len(output.token_ids)


@pytest.mark.parametrize("strings", ["", ["sea", ""], [5], 5, ["\ud800"]])
def test_an_empty_stop_string_is_one_clear_error(strings: Any) -> None:
    model, tokenizer = demo()
    message = "stop_strings: got .*; allowed: one text or several, none of them empty"
    with pytest.raises(ValueError, match=message):
        TokenRecycling(model, tokenizer).generate(PROMPT, stop_strings=strings)
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    options = {"attention_mask": torch.ones_like(ids), "stop_strings": strings}
    with pytest.raises(ValueError, match=message):
        model.generate(ids, **options, custom_generate=recycling(tokenizer))


@pytest.mark.parametrize("method", list(METHODS)[1::2])
def test_a_stream_is_the_answer_in_pieces(method: str) -> None:
    model, tokenizer = demo()
    decoder = decoder_for(method, model, tokenizer)
    output = decoder.generate(PROMPT, max_new_tokens=20)
    decoder.reset()
    pieces = list(decoder.stream(PROMPT, max_new_tokens=20))
    assert "".join(map(str, pieces)) == output.text
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert pieces[-1].record.stop_reason == output.stop_reason
    assert [len(piece.token_ids) for piece in pieces] == output.accept_lengths


def test_a_stream_that_is_left_can_be_continued() -> None:
    model, tokenizer = demo()
    decoder = TokenRecycling(model, tokenizer)
    ids = tokenizer(PROMPT).input_ids
    stream = decoder.stream(ids, max_new_tokens=20)
    said = [token for _ in range(3) for token in next(stream).token_ids]
    stream.close()
    prompt = [*ids, *said, *tokenizer(" USER: And").input_ids]
    output = decoder.generate(prompt, max_new_tokens=10)
    assert output.token_ids == referee(decoder.target, prompt, 10)


@pytest.mark.parametrize("policy", ["average", "original"])
def test_two_texts_at_a_time_are_refused(policy: str) -> None:
    model, tokenizer = demo()
    decoder = TokenRecycling(model, tokenizer, policy=policy)
    first, second = ("USER: Who are you? ASSISTANT:", PROMPT)
    stream = decoder.stream(first, max_new_tokens=20)
    next(stream)
    expected = referee(decoder.target, tokenizer(second).input_ids, 20)
    other = decoder.stream(second, max_new_tokens=20)
    tokens = next(other).token_ids
    with pytest.raises(RuntimeError, match="one text at a time"):
        next(stream)
    tokens = tokens + [token for piece in other for token in piece.token_ids]
    assert tokens == expected
    # A text that is complete needs nothing more.
    ended = decoder.stream(first, max_new_tokens=4)
    said = []
    while True:
        piece = next(ended)
        said += piece.token_ids
        if piece.record.stop_reason:
            break
    decoder.generate(second, max_new_tokens=12)
    assert list(ended) == []
    prompt = [*tokenizer(first).input_ids, *said, 5]
    expected = referee(decoder.target, prompt, 12)
    assert decoder.generate(prompt, max_new_tokens=12).token_ids == expected


def test_a_matrix_is_saved_loaded_and_forgotten(tmp_path: Path) -> None:
    model, tokenizer = demo()
    first, second = TokenRecycling(model, tokenizer), TokenRecycling(model, tokenizer)
    first.generate(PROMPT, max_new_tokens=20)
    first.save_memory(tmp_path / "matrix.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["matrix.safetensors"]
    second.load_memory(tmp_path / "matrix.safetensors")
    learned = first.drafter.memory()["adjacency"]
    assert learned.any() and torch.equal(second.drafter.memory()["adjacency"], learned)
    second.reset()
    assert not second.drafter.memory()["adjacency"].any()
    with pytest.raises(ValueError, match="int32 of shape"):
        TokenRecycling(model, output_id_topk=9).load_memory(tmp_path / "matrix.safetensors")
    with pytest.raises(ValueError, match="keeps nothing"):
        SpeculativeDecoder(model, method="pld").save_memory(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="keeps nothing"):
        SpeculativeDecoder(model, method="pld").load_memory(tmp_path / "matrix.safetensors")


def test_a_matrix_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    model, tokenizer = demo()
    file, bare = tmp_path / "matrix.safetensors", tmp_path / "bare.safetensors"
    TokenRecycling(model, tokenizer).save_memory(file)
    TokenRecycling(model).save_memory(bare)

    words = json.loads(tokenizer.backend_tokenizer.to_str())
    ids = words["model"]["vocab"]
    ids["the"], ids["and"] = ids["and"], ids["the"]
    other = copy.deepcopy(tokenizer)
    other._tokenizer = Tokenizer.from_str(json.dumps(words))
    assert len(other) == len(tokenizer)
    with pytest.raises(ValueError, match=r"^memory .*: was learned with another tokenizer,"):
        TokenRecycling(model, other).load_memory(file)
    decode = recycling(other)
    decode.load_memory(file)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with pytest.raises(ValueError, match="another tokenizer"):
        model.generate(ids, custom_generate=decode, max_new_tokens=3)

    enlarged = copy.deepcopy(tokenizer)
    enlarged.add_special_tokens({"pad_token": "<another>"})
    TokenRecycling(model, enlarged).load_memory(file)  # special tokens may differ
    TokenRecycling(model).load_memory(file)  # without a tokenizer nothing is known
    TokenRecycling(model, other).load_memory(bare)


def test_a_cold_start_forgets_before_every_prompt() -> None:
    model = known(LLAMA).build()
    hot, cold = TokenRecycling(model), TokenRecycling(model, start="cold")
    for decoder in (hot, cold):
        decoder.generate([61, 62, 63], max_new_tokens=5)
        decoder.generate([1, 2, 3], max_new_tokens=1)
    assert hot.drafter.memory()["adjacency"][61].any()
    assert not cold.drafter.memory()["adjacency"][61].any()


def test_a_cold_start_learns_from_the_same_prompt_again() -> None:
    cold, prompt = TokenRecycling(known(LLAMA).build(), start="cold"), random_ids(40)
    first, again = (cold.generate(prompt, max_new_tokens=20) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert first.accept_lengths == again.accept_lengths
    assert len(first.accept_lengths) < 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "recyclin"}, "method: got 'recyclin'; .*did you mean recycling"),
        (
            {"method": "recycling", "output_id_top": 8},
            "option of recycling: got 'output_id_top'; .*mean output_id_topk",
        ),
        ({"method": "recycling", "output_id_topk": 0}, "output_id_topk: got 0; allowed: 1 or more"),
        ({"method": "vanilla", "top": 1}, "option of vanilla: got 'top'; allowed: none"),
    ],
)
def test_a_wrong_option_of_a_method_is_one_clear_error(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(demo()[0], **options)


def test_a_wrong_value_of_a_method_is_found_before_the_weights_load(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="output_id_topk: got 0"):
        TokenRecycling.from_pretrained(tmp_path, output_id_topk=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: got 2.5; allowed: integers of 1 or more"),
        ({"temperature": -1}, "temperature: got -1"),
        ({"max_new_tokens": True}, "max_new_tokens: got True; allowed: integers of 1 or more"),
        *(
            (
                {"temperature": value},
                rf"temperature: got {re.escape(repr(value))}; allowed: 0 .greedy., or 1e-06 to 1e",
            )
            for value in ("0.5", 1e-40, 1e40, float("nan"), float("inf"), True, None)
        ),
        *(
            ({"top_k": value}, f"top_k: got {value!r}; allowed: integers of 0 or more")
            for value in (2.5, -1, True, "5")
        ),
        *(
            ({"top_p": value}, f"top_p: got {value!r}.*; allowed: numbers above 0, at most 1")
            for value in (0, 1.5, "0.9", float("nan"))
        ),
        ({"min_p": 2}, "min_p: got 2; allowed: numbers from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty: got 0; allowed: numbers above 0"),
        ({"presence_penalty": 3}, "presence_penalty: got 3; allowed: numbers from -2 to 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty: got '1'; allowed: numbers from -2 to 2"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens: got 9; allowed: at most 8"),
        ({"max_time": 0}, "max_time: got 0; allowed: seconds above 0"),
        ({"cancel": True}, "cancel: got True; allowed: a threading.Event"),
        ({"logprobs": -1}, "logprobs: got -1; allowed: integers of 0 or more"),
        ({"ignore_eos": 1}, "ignore_eos: got 1; allowed: True or False"),
        ({"stop_token_ids": 5}, "stop_token_ids: got 5; allowed: a list"),
        ({"stop_token_ids": [999]}, "stop_token_ids: got 999; allowed: integers of 0 to"),
        ({"tools": "search"}, "tools: got 'search'; allowed: a list"),
        (
            {"tools": [{}]},
            "tools: got it with a prompt that is no chat; allowed: with chat messages",
        ),
        (
            {"continue_final_message": True},
            "continue_final_message: got it with a prompt that is no",
        ),
        *(
            ({"seed": value}, "seed: got .*; allowed: integers of -")
            for value in (2**70, 1.5, True)
        ),
        ({"stop_strings": ["x"]}, "stop_strings: got strings without a tokenizer"),
    ],
)
def test_a_wrong_value_for_an_answer_is_one_clear_error(options: Any, message: str) -> None:
    decoder = TokenRecycling(known(LLAMA).build())
    with pytest.raises(ValueError, match=message):
        decoder.generate([1, 2], **options)
    with pytest.raises(ValueError, match=message):
        list(decoder.stream([1, 2], **options))
    with pytest.raises(ValueError, match="got text without a tokenizer"):
        decoder.generate("text")


def test_numbers_of_numpy_are_numbers() -> None:
    decoder = TokenRecycling(known(LLAMA).build(), output_id_topk=np.int64(8))
    assert type(decoder.drafter.config.output_id_topk) is int
    words = {"max_new_tokens": 5, "temperature": 0.75, "top_k": 9, "top_p": 0.5, "seed": 3}
    of_numpy = {name: np.asarray(value)[()] for name, value in words.items()}
    found = [decoder.generate([1, 2], **one).token_ids for one in (words, of_numpy)]
    assert found[0] == found[1]


def test_temperature_0_is_greedy_whatever_top_k_and_top_p_are() -> None:
    decoder = TokenRecycling(known(LLAMA).build())
    expected = decoder.generate([1, 2], max_new_tokens=8).token_ids
    words = {"temperature": 0, "top_p": 0.9, "top_k": 20, "seed": 1}
    assert decoder.generate([1, 2], max_new_tokens=8, **words).token_ids == expected


@pytest.mark.parametrize("form", [list, tuple, torch.tensor])
def test_ends_of_text_come_in_any_form(form: Any) -> None:
    decoder = TokenRecycling(known(LLAMA).build())
    whole = decoder.generate(random_ids(9), max_new_tokens=20).token_ids
    decoder.target.model.generation_config.eos_token_id = form([whole[5], whole[7]])
    end = min(whole.index(whole[5]), whole.index(whole[7]))
    assert decoder.generate(random_ids(9), max_new_tokens=20).token_ids == whole[: end + 1]


def test_settings_of_the_checkpoint_that_do_not_count_are_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = TokenRecycling(known(LLAMA).build())
    config = decoder.target.model.generation_config
    neutral = {
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "guidance_scale": 1.0,
        "suppress_tokens": [],
    }
    for name, value in neutral.items():
        setattr(config, name, value)
    config.repetition_penalty = 1.3
    for _ in range(2):
        decoder.generate([1, 2], max_new_tokens=4)
        list(decoder.stream([1, 2], max_new_tokens=4))
    said = "generation_config: repetition_penalty=1.3 apply only to the model's own generate"
    assert caplog.text.count(said) == 1


def num_tensors() -> int:
    """Return how many tensors there are."""
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def test_many_answers_leave_no_more_behind_than_one() -> None:
    decoder = SpeculativeDecoder(known(LLAMA).build(), method="recycling")
    decoder.queue.prefix_cache.most_bytes = 0  # beside the last text's rows
    counts = []
    for seed in range(6):
        decoder.generate(random_ids(20, seed=seed), max_new_tokens=20)
        counts.append(num_tensors())
    assert max(counts[3:]) <= counts[2], "tensors of earlier answers are still there"


def test_packages_names_are_there_and_no_others() -> None:
    assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Recycler'"):
        _ = package.Recycler


@pytest.mark.parametrize(("method", "duplicate"), pairs(METHODS, [copy.copy, copy.deepcopy]))
def test_a_copy_is_a_decoder_of_its_own_that_has_learned_the_same(
    method: str, duplicate: Any
) -> None:
    model, tokenizer = demo()
    decoder = decoder_for(method, model, tokenizer)
    expected = decoder.generate(PROMPT, max_new_tokens=20).token_ids
    memory = decoder.drafter.memory()
    twin = duplicate(decoder)
    assert type(twin) is type(decoder) and twin.drafter.config == decoder.drafter.config
    assert twin.target.model is model, "weights are not copied"
    assert all(torch.equal(found, memory[name]) for name, found in twin.drafter.memory().items())
    streams = [one.stream(PROMPT, max_new_tokens=20) for one in (decoder, twin)]
    texts = [[next(stream)] for stream in streams]
    for text, stream in zip(texts, streams, strict=True):
        assert [token for piece in (*text, *stream) for token in piece.token_ids] == expected
    twin.reset()
    assert decoder.drafter.memory().keys() == memory.keys()
    if method == "recycling":
        assert decoder.drafter.memory()["adjacency"].any(), "the copy forgot for both"


def test_a_copy_keeps_the_class_and_options() -> None:
    model, tokenizer = demo()
    decoder = TokenRecycling(model, tokenizer, output_id_topk=9, policy="accepted-only")
    assert isinstance(copy.copy(decoder), TokenRecycling)
    assert copy.copy(decoder).drafter.config == decoder.drafter.config


@pytest.mark.parametrize("method", list(METHODS)[::4])
def test_a_decoder_is_not_pickled(method: str) -> None:
    decoder = decoder_for(method, *demo())
    decoder.generate(PROMPT, max_new_tokens=4)
    with pytest.raises(TypeError, match=r"^decoder: cannot be pickled, .*save_memory.*$"):
        pickle.dumps(decoder)


def test_chat_messages_go_through_the_chat_template() -> None:
    model, tokenizer = demo()
    decoder = TokenRecycling(model, tokenizer)
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    expected = decoder.generate(ids, max_new_tokens=12)
    found = decoder.generate(messages, max_new_tokens=12)
    assert found.sequences.tolist() == expected.sequences.tolist()
    pieces = decoder.stream(messages, max_new_tokens=12)
    assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "user"}], "the chat template does not take these messages: "),
        ([{"role": "user", "content": "a"}, 3], "the chat template does not take these messages: "),
    ],
)
def test_messages_that_the_template_does_not_take_are_one_line(messages: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^prompt: {says}.*$") as error:
        TokenRecycling(*demo()).generate(messages)
    assert "\n" not in str(error.value)


def test_messages_without_a_template_are_one_line() -> None:
    model = demo()[0]
    with pytest.raises(ValueError, match=r"^prompt: got chat messages without a tokenizer.*text"):
        TokenRecycling(model).generate([{"role": "user", "content": "Hello."}])


def test_an_empty_text_is_the_beginning_of_every_text_and_no_token_is_refused() -> None:
    model, tokenizer = demo()
    decoder = TokenRecycling(model, tokenizer)
    begin = tokenizer("").input_ids
    assert decoder.generate("", max_new_tokens=3).sequences[0, : len(begin)].tolist() == begin
    for nothing in ([], torch.tensor([], dtype=torch.long)):
        with pytest.raises(ValueError, match="prompt: got no token; allowed: at least one"):
            decoder.generate(nothing)


def test_a_model_without_numbers_is_refused_in_one_line() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(demo()[0].config).eval()
    with pytest.raises(UnsupportedModelError, match=r"^model: .* on the device meta.*such as cpu$"):
        TokenRecycling(model)
