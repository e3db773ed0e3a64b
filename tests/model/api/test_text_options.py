"""Arguments of a text: each gives what transformers' `generate` gives with the argument of its meaning.

Run: pytest tests/model/api/test_text_options.py
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import typing
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from model import SpeculativeDecoder
from model.api.text_options import ManyTexts, OneText, TextOptions
from tests.model.api.test_decoder import PROMPT, decoder_for, demo
from tests.model.decoded import known, random_ids
from tests.pairs import pairs

LLAMA = "Llama, grouped heads"
METHODS = ("vanilla", "recycling", "hybrid")
PLAIN: dict[str, Any] = {"max_new_tokens": 24}
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_k": 0}


class Counted(LogitsProcessor):
    """OpenAI's penalties, one token after the other."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token in set(new := input_ids[0, len(IDS) :].tolist()):
            scores[0, token] -= self.presence + self.frequency * new.count(token)
        return scores


IDS = random_ids(12)
# Arguments here, and of transformers' generate.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "min_p": ({**DRAWN, "min_p": 0.02}, {**DRAWN, "min_p": 0.02}),
    "repetition_penalty": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "repetition_penalty, drawn": (
        {**DRAWN, "repetition_penalty": 1.4},
        {**DRAWN, "repetition_penalty": 1.4},
    ),
    "presence and frequency": (
        {"presence_penalty": 1.5, "frequency_penalty": 0.4},
        {"logits_processor": [Counted(1.5, 0.4)]},
    ),
    "all penalties, drawn": (
        {**DRAWN, "repetition_penalty": 1.2, "presence_penalty": 2, "frequency_penalty": -1},
        {**DRAWN, "repetition_penalty": 1.2, "logits_processor": [Counted(2, -1)]},
    ),
    "ends": ({"stop_token_ids": "END"}, {"eos_token_id": "END"}),
    "ends and at least": (
        {"stop_token_ids": "END", "min_new_tokens": 20},
        {"eos_token_id": "END", "min_new_tokens": 20},
    ),
    "no ends": ({"ignore_eos": True}, {"eos_token_id": None}),
    "logprobs change nothing": ({"logprobs": 3}, {}),
    "logprobs change no draw": ({**DRAWN, "logprobs": 0}, DRAWN),
}


@pytest.mark.parametrize(("case", "method"), pairs(list(CASES), METHODS))
def test_arguments_give_what_generate_gives(case: str, method: str) -> None:
    model = known(LLAMA).build()
    ids = torch.tensor([IDS])
    decoder = decoder_for(method, model)
    model.generation_config.eos_token_id = None
    whole = decoder.generate(ids, **PLAIN).token_ids
    if case == "no ends":
        model.generation_config.eos_token_id = whole[4]
    ours, theirs = (
        {name: [whole[6], whole[9]] if value == "END" else value for name, value in words.items()}
        for words in CASES[case]
    )
    torch.manual_seed(5)
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample="temperature" in theirs,
        pad_token_id=0,
        **PLAIN,
        **theirs,
    )
    torch.manual_seed(5)
    found = decoder.generate(ids, **PLAIN, **ours)
    assert torch.equal(found.sequences, expected)
    if "logprobs" not in ours and case != "no ends":
        torch.manual_seed(5)
        bare = decoder.generate(ids, **PLAIN, **(DRAWN if "temperature" in ours else {}))
        assert found.token_ids != bare.token_ids, "an argument without effect proves nothing"
    torch.manual_seed(5)
    (beside,) = decoder.generate_all([ids], **PLAIN, **ours)
    assert beside.token_ids == found.token_ids
    for one, other in zip(beside.logprobs or (), found.logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("words", [{}, {**DRAWN, "seed": 2, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("method", METHODS)
def test_log_probabilities_are_the_models_own(method: str, words: dict[str, Any]) -> None:
    model = known(LLAMA).build()
    decoder = decoder_for(method, model)
    output = decoder.generate(IDS, max_new_tokens=14, logprobs=3, **words)
    with torch.inference_mode():
        rows = model(output.sequences).logits[0, len(IDS) - 1 : -1].log_softmax(dim=-1)
    assert output.logprobs is not None and len(output.logprobs) == len(rows) == 14
    for one, row, token in zip(output.logprobs, rows, output.token_ids, strict=True):
        assert one.token_id == token and one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [id_ for id_, _ in one.top] == row.topk(3).indices.tolist()
    pieces = list(decoder.stream(IDS, max_new_tokens=14, logprobs=3, **words))
    streamed = [one for piece in pieces for one in piece.logprobs or ()]
    for one, other in zip(streamed, output.logprobs, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_several_texts_of_a_prompt_are_those_of_the_next_seeds() -> None:
    decoder = decoder_for("recycling", *demo())
    words: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.1}
    found = decoder.generate_all([PROMPT, IDS], n=3, seed=7, **words)
    expected = [
        decoder.generate(prompt, seed=7 + 3 * place + sample, **words).token_ids
        for place, prompt in enumerate((PROMPT, IDS))
        for sample in range(3)
    ]
    assert [one.token_ids for one in found] == expected
    assert len({tuple(one.token_ids) for one in found}) == 6


@pytest.mark.parametrize("method", ["recycling", "hybrid"])
@pytest.mark.parametrize("why", ["time", "cancelled"])
def test_a_text_ends_after_the_step_under_way(method: str, why: str) -> None:
    decoder = decoder_for(method, *demo())
    whole = decoder.generate(PROMPT, max_new_tokens=20)
    event = threading.Event()
    words: dict[str, Any] = {"max_time": 1e-9} if why == "time" else {"cancel": event}
    pieces = []
    for piece in decoder.stream(PROMPT, max_new_tokens=20, **words):
        pieces.append(piece)
        if len(pieces) == 2:
            event.set()
    assert pieces[-1].finish_reason == pieces[-1].record.stop_reason == why
    assert len(pieces) == (1 if why == "time" else 3)
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == whole.token_ids[: len(tokens)]
    (first,) = decoder.generate_all([PROMPT], max_time=1e-9, max_new_tokens=20)
    assert first.finish_reason == "time" and len(first.steps) == 1
    assert decoder.generate(PROMPT, max_new_tokens=20).token_ids == whole.token_ids


def test_a_cancelled_list_has_the_answers_that_had_begun() -> None:
    decoder, event = decoder_for("pld", *demo()), threading.Event()

    def cancelling(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids[0].tolist() == demo()[1](PROMPT).input_ids:
            event.set()
        return scores

    prompts = [IDS, PROMPT, IDS, IDS]
    words: dict[str, Any] = {"batch_size": 1, "max_new_tokens": 5}
    found = decoder.generate_all(prompts, cancel=event, logits_processors=[cancelling], **words)
    assert [one.finish_reason for one in found] == ["length", "cancelled"]
    assert decoder.generate_all(prompts, cancel=event, **words) == []


def test_outputs_say_how_they_ended_and_are_json() -> None:
    model, tokenizer = demo()
    decoder = decoder_for("recycling", model, tokenizer)
    whole = decoder.generate(PROMPT, max_new_tokens=20, logprobs=1)
    assert whole.finish_reason == "length" and whole.stop_string is None
    found = json.loads(json.dumps(whole.to_dict()))
    assert found["text"] == whole.text and found["token_ids"] == whole.token_ids
    assert found["logprobs"][0]["token_id"] == whole.token_ids[0]
    assert found["prompt_tokens"] + len(whole.token_ids) == whole.sequences.shape[1]
    stop = whole.text[9:14]
    stopped = decoder.generate(PROMPT, max_new_tokens=20, stop_strings=stop)
    assert (stopped.finish_reason, stopped.stop_string) == ("stop", stop)
    pieces = list(decoder.stream(PROMPT, max_new_tokens=20, stop_strings=stop))
    assert "".join(map(str, pieces)) == stopped.text == whole.text[: whole.text.index(stop)]
    assert pieces[-1].stop_string == stop and pieces[-1].finish_reason == "stop"


def test_a_stop_string_of_special_tokens_is_named() -> None:
    decoder = decoder_for("pld", *demo())
    words: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True, "stop_strings": "</s>"}
    output = decoder.generate(PROMPT, **words)
    assert (output.stop_reason, output.stop_string) == ("criteria", "</s>")
    assert output.token_ids[-1] == 2 and output.text


def test_an_async_stream_lets_the_loop_go_on_and_ends_when_it_is_left() -> None:
    decoder = decoder_for("recycling", *demo())
    expected = decoder.generate(PROMPT, max_new_tokens=12)

    async def texts() -> None:
        main, threads, beside = threading.current_thread(), [], []

        def noting(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            threads.append(threading.current_thread())
            return scores

        async def other() -> None:
            async for piece in decoder.session().astream(PROMPT, max_new_tokens=12):
                beside.append(piece)

        task = asyncio.create_task(other())
        pieces = [
            piece
            async for piece in decoder.astream(
                PROMPT, max_new_tokens=12, logits_processors=[noting]
            )
        ]
        await task
        assert "".join(map(str, pieces)) == "".join(map(str, beside)) == expected.text
        assert main not in threads and len(set(threads)) == 1
        left = decoder.astream(PROMPT, max_new_tokens=200)
        await anext(left)
        await left.aclose()
        again = [piece async for piece in decoder.astream(PROMPT, max_new_tokens=12)]
        assert "".join(map(str, again)) == expected.text
        with pytest.raises(ValueError, match="max_new_tokens: got 0"):
            await anext(decoder.astream(PROMPT, max_new_tokens=0))

    asyncio.run(texts())


# Chats

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if not enable_thinking %} -{% endif %}{% endif %}"
)
ASKED = [{"role": "user", "content": "Tell me."}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "The sea is"}]


def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: the word.
    """
    return word


@pytest.mark.parametrize(
    ("messages", "words", "begun"),
    [
        (ASKED, {}, "user: Tell me.\nassistant: -"),
        (ASKED, {"continue_final_message": False}, "user: Tell me.\nassistant: -"),
        (ASKED, {"chat_template_kwargs": {"enable_thinking": True}}, "user: Tell me.\nassistant:"),
        (ASKED, {"tools": [lookup]}, "[lookup]user: Tell me.\nassistant: -"),
        (ANSWERED, {"continue_final_message": True}, "user: Tell me.\nassistant: The sea is"),
        (
            ANSWERED,
            {"continue_final_message": False},
            "user: Tell me.\nassistant: The sea is\nassistant: -",
        ),
    ],
)
def test_chats_are_written_by_the_template(
    messages: Any, words: dict[str, Any], begun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = demo()
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    decoder = decoder_for("pld", model, tokenizer)
    expected = tokenizer(begun, add_special_tokens=False).input_ids
    output = decoder.generate(messages, max_new_tokens=3, **words)
    assert output.sequences[0, :-3].tolist() == expected
    assert decoder.generate_all([messages], max_new_tokens=3, **words)[0].text == output.text


@pytest.mark.parametrize(
    ("messages", "words", "says"),
    [
        (ANSWERED, {}, "continue_final_message: got None for a chat that ends with the assistant"),
        (ASKED, {"continue_final_message": True}, "continue_final_message: got True for a chat"),
        (
            ASKED,
            {"chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking: got it for a chat template that does not read it; leave it out",
        ),
        (
            ASKED,
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            "add_generation_prompt: got it for a chat template",
        ),
        (ASKED, {"chat_template_kwargs": ["a"]}, "chat_template_kwargs: got .*; allowed: a dict"),
        ([{"role": "user", "content": "\ud800"}], {}, "prompt: got text with lone surrogates"),
        ("\ud800", {}, "prompt: got text with lone surrogates; allowed: text that UTF-8 can"),
        (PROMPT, {"tools": [lookup]}, "tools: got it with a prompt that is no chat; allowed"),
    ],
)
def test_what_a_chat_cannot_take_is_one_line(messages: Any, words: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}.*$") as error:
        decoder_for("pld", *demo()).generate(messages, **words)
    assert "\n" not in str(error.value)


# Processors


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (lambda ids, scores: None, "got None from <function"),
        (lambda ids, scores: scores[0], r"got shape \[8192\] from .*; allowed: scores \[1, 8192\]"),
        (lambda ids, scores: scores * float("nan"), "got NaN from them; allowed: numbers and -inf"),
    ],
)
def test_what_processors_give_is_looked_at(processor: Any, says: str, temperature: float) -> None:
    decoder = decoder_for("recycling", *demo())
    words: dict[str, Any] = {"temperature": temperature, "logits_processors": [processor]}
    with pytest.raises(ValueError, match=f"^logits_processors: {says}"):
        decoder.generate(PROMPT, max_new_tokens=3, **words)
    assert decoder.generate(PROMPT, max_new_tokens=3).text


def test_no_token_to_draw_is_said() -> None:
    nothing = [lambda ids, scores: scores * 0 - float("inf")]
    with pytest.raises(ValueError, match=r"^logits_processors: left no token to draw"):
        decoder_for("pld", *demo()).generate(PROMPT, temperature=1.0, logits_processors=nothing)


# One table


def test_names_are_the_same_for_users_checkers_and_help() -> None:
    names = [field.name for field in fields(TextOptions)]
    assert OneText.__annotations__.keys() == {*names}
    more = {"n", "batch_size", "shares_memory", "show_progress"}
    assert ManyTexts.__annotations__.keys() == {*names} | more
    for name in ("generate", "stream", "astream", "as_completed", "generate_all"):
        function = getattr(SpeculativeDecoder, name)
        parameters = inspect.signature(function).parameters
        assert parameters.keys() >= {*names} and "arguments" not in parameters
        for field in fields(TextOptions):
            assert parameters[field.name].default == field.default
        assert all(f"\n- {name}: " in str(inspect.getdoc(function)) for name in names)


def test_types_are_the_same_for_checkers() -> None:
    written = {field.name: field.type for field in fields(TextOptions)}
    for name, hint in OneText.__annotations__.items():
        assert typing.cast(Any, hint).__forward_arg__ == written[name]
