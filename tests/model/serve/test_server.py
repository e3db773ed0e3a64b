"""The server: its texts are those of the library, whatever else runs, and what is wrong is said in OpenAI's form.

Run: pytest tests/model/serve/test_server.py
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
import torch

pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

from model.engine.batch import Event
from tests.hang import wait_for
from tests.model.api.test_decoder import decoder_for, demo
from tests.model.serve.serving import NAME, Served, serving

TOPICS = ("the sea", "rain", "your name", "a boat and its people", "music")
PROMPTS = [f"USER: Tell me about {topic}. ASSISTANT:" for topic in TOPICS]
CHAT = [{"role": "user", "content": "Tell me about the sea."}]
METRICS = ("drafts", "draft_tokens", "accepted_tokens")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(
        batch_size=4, max_new_tokens=200, max_prompt_tokens=500, max_body_bytes=9000
    ) as it:
        yield it


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, which ends as it should."""
    *events, end, rest = text.split("\n\n")
    assert end == "data: [DONE]" and rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_answers_beside_each_other_are_those_of_generate(served: Served) -> None:
    decoder = decoder_for("vanilla", *demo())
    expected = [decoder.generate(prompt, max_new_tokens=24) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(
            pool.map(
                lambda prompt: served.ask(prompt=prompt, max_tokens=24, return_token_ids=True),
                PROMPTS,
            )
        )
    for reply, one in zip(found, expected, strict=True):
        body = reply.json()
        (choice,) = body["choices"]
        assert choice["text"] == one.text and choice["token_ids"] == one.token_ids
        assert choice["finish_reason"] == {"eos": "stop", "length": "length"}[one.stop_reason or ""]
        assert choice["prompt_token_ids"] == one.sequences[0, : -len(one.token_ids)].tolist()
        assert body["usage"]["completion_tokens"] == len(one.token_ids)
        assert body["usage"]["total_tokens"] == one.sequences.shape[1]
        own = body["metrics"]["token_recycling"]
        assert sum(own["accept_lengths"]) == len(one.token_ids)
        assert len(own["accept_lengths"]) == own["num_steps"]


def test_draws_with_a_seed_are_those_of_generate(served: Served) -> None:
    decoder = decoder_for("vanilla", *demo())
    words = {"temperature": 1.2, "top_k": 50, "top_p": 0.9}

    def ask(index: int) -> str:
        reply = served.ask(prompt=PROMPTS[index], max_tokens=9, seed=index, **words)
        return reply.json()["choices"][0]["text"]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(ask, range(len(PROMPTS))))
    assert found == [
        decoder.generate(prompt, max_new_tokens=9, seed=index, **words).text
        for index, prompt in enumerate(PROMPTS)
    ]
    greedy = served.ask(prompt=PROMPTS[0], max_tokens=9).json()["choices"][0]["text"]
    assert greedy != found[0], "an option without effect proves nothing"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": 2, "frequency_penalty": 0.5}, None),
        (
            {"min_tokens": 38, "stop_token_ids": [598]},
            {"min_new_tokens": 38, "stop_token_ids": [598]},
        ),
        ({"stop_token_ids": [4559]}, None),
        ({"temperature": 1.2, "seed": 1, "min_p": 0.3}, None),
    ],
)
def test_fields_of_vllm_are_the_librarys_arguments(
    served: Served, fields: dict[str, Any], words: dict[str, Any] | None
) -> None:
    decoder = decoder_for("vanilla", *demo())
    expected = decoder.generate(PROMPTS[0], max_new_tokens=40, **(words or fields))
    reply = served.ask(prompt=PROMPTS[0], max_tokens=40, **fields).json()
    assert reply["choices"][0]["text"] == expected.text
    assert reply["usage"]["completion_tokens"] == len(expected.token_ids)
    plain = decoder.generate(PROMPTS[0], max_new_tokens=40)
    assert expected.token_ids != plain.token_ids, "a field without effect proves nothing"


def test_a_request_without_a_temperature_is_sampled_as_openai_says(served: Served) -> None:
    decoder = decoder_for("vanilla", *demo())
    one = decoder.generate(PROMPTS[0], max_new_tokens=15, temperature=1.0, seed=3)
    reply = served.ask(prompt=PROMPTS[0], max_tokens=15, seed=3, temperature=None)
    assert reply.json()["choices"][0]["text"] == one.text


def test_a_stream_is_the_answer_in_pieces(served: Served) -> None:
    fields = {"messages": CHAT, "max_completion_tokens": 40, "return_token_ids": True}
    path = "/v1/chat/completions"
    whole = served.ask(path, **fields).json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = served.ask(path, **fields, stream=True, stream_options=options)
    *chunks, last = events_of(reply.text)
    assert reply.headers["content-type"].startswith("text/event-stream")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    message = whole["choices"][0]["message"]
    assert "".join(delta["content"] for delta in deltas) == message["content"]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole["choices"][0]["finish_reason"]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and last["usage"] == whole["usage"]
    assert (
        last["choices"] == []
        and sum(last["metrics"]["token_recycling"]["accept_lengths"]) == counts[-1]
    )
    bare = events_of(served.ask(path, **fields, stream=True).text)
    assert all("usage" not in chunk and chunk["choices"] for chunk in bare)


def test_a_chat_is_read_by_the_template(served: Served) -> None:
    decoder = decoder_for("vanilla", *demo())
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "about the sea."}]
    system = {"role": "system", "content": "Be brief."}
    for messages in ([system, *CHAT], [{"role": "user", "content": parts}]):
        reply = served.ask("/v1/chat/completions", messages=messages, max_tokens=20)
        content = reply.json()["choices"][0]["message"]["content"]
        assert content == decoder.generate(messages, max_new_tokens=20).text


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_text_ends_before_a_stop_string(served: Served, is_stream: bool) -> None:
    decoder = decoder_for("vanilla", *demo())
    full = decoder.generate(PROMPTS[0], max_new_tokens=40)
    middle = len(full.text) // 2
    stop = full.text[middle : middle + 9]  # over several tokens
    kept = full.text[: full.text.index(stop)]
    fields = {"prompt": PROMPTS[0], "max_tokens": 40, "stop": ["@@@", stop]}
    reply = served.ask(**fields, stream=is_stream, stream_options={"include_usage": True})
    if is_stream:
        *chunks, last = events_of(reply.text)
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
        assert "".join(texts) == kept
    else:
        body = reply.json()
        reason, usage = body["choices"][0]["finish_reason"], body["usage"]
        assert body["choices"][0]["text"] == kept
    assert reason == "stop"
    num = next(n for n in range(41) if stop in demo()[1].decode(full.token_ids[:n]))
    assert usage["completion_tokens"] == num, "the token that completes the stop string counts"
    missed = served.ask(prompt=PROMPTS[0], max_tokens=40, stop="@@@").json()
    assert missed["choices"][0]["text"] == full.text


def test_the_counters_are_the_sums_of_the_fields_of_responses(served: Served) -> None:
    before = served.counters()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        replies = list(
            pool.map(lambda prompt: served.ask(prompt=prompt, max_tokens=25).json(), PROMPTS)
        )
    after = served.counters()

    def delta(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    fields = [reply["metrics"]["speculative_decoding"] for reply in replies]
    accepted = [one for field in fields for one in field["per_step_accepted"]]
    assert delta("vllm:spec_decode_num_drafts_total") == len(accepted) > 0
    assert delta("vllm:spec_decode_num_accepted_tokens_total") == sum(accepted) > 0
    drafted = sum(field["num_draft_tokens"] for field in fields)
    assert delta("vllm:spec_decode_num_draft_tokens_total") == drafted
    for position in range(max(accepted)):
        name = f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{position}]"
        assert delta(name) == sum(one > position for one in accepted)
    tokens = sum(reply["usage"]["completion_tokens"] for reply in replies)
    assert delta("vllm:generation_tokens_total") == tokens
    steps = sum(reply["metrics"]["token_recycling"]["num_steps"] for reply in replies)
    assert delta("token_recycling:steps_total") == steps
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


def test_log_probabilities_are_those_of_the_model(served: Served) -> None:
    model, tokenizer = demo()
    fields = {"prompt": PROMPTS[1], "max_tokens": 12, "logprobs": 3, "return_token_ids": True}
    choice = served.ask(**fields).json()["choices"][0]
    plain = served.ask(prompt=PROMPTS[1], max_tokens=12).json()["choices"][0]
    assert choice["text"] == plain["text"] and plain["logprobs"] is None
    tokens, prompt = choice["token_ids"], choice["prompt_token_ids"]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    rows = logits.log_softmax(-1)
    found = choice["logprobs"]
    expected = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
    assert found["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert found["tokens"] == [tokenizer.decode([token]) for token in tokens]
    for top, row in zip(found["top_logprobs"], rows, strict=True):
        assert list(top.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    chat = {"messages": CHAT, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    content = served.ask("/v1/chat/completions", **chat).json()["choices"][0]["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in content] == [2] * len(content)
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in content), "greedy"


def test_the_model_is_listed_and_the_server_well(served: Served) -> None:
    (model,) = served.client.get("/v1/models").json()["data"]
    assert model["id"] == NAME and model["max_model_len"] == 3072
    assert served.client.get(f"/v1/models/{NAME}").json() == model
    other = served.client.get("/v1/models/meta/other")
    assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"
    assert served.client.get("/health").status_code == 200


def test_fields_that_change_nothing_are_taken(served: Served) -> None:
    expected = served.ask(prompt=PROMPTS[0], max_tokens=9).json()["choices"]
    harmless = {
        **{"n": 1, "best_of": 1, "user": "me", "frequency_penalty": 0.0, "logit_bias": {}},
        **{"presence_penalty": 0, "suffix": None, "stop": None, "top_k": -1, "tools": []},
        **{"response_format": {"type": "text"}, "metadata": {"a": "b"}, "logprobs": None},
    }
    assert served.ask(prompt=[PROMPTS[0]], max_tokens=9, **harmless).json()["choices"] == expected
    ids = demo()[1](PROMPTS[0]).input_ids
    assert served.ask(prompt=ids, max_tokens=9).json()["choices"] == expected
    assert served.ask(prompt=[ids], max_tokens=9).json()["choices"] == expected


def test_prompts_and_choices_are_answered_beside_each_other(served: Served) -> None:
    decoder = decoder_for("vanilla", *demo())
    texts = [decoder.generate(prompt, max_new_tokens=12).text for prompt in PROMPTS]
    body = served.ask(prompt=PROMPTS, max_tokens=12).json()
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(PROMPTS)))
    drawn = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "n": 3}
    expected = [
        decoder.generate(prompt, max_new_tokens=12, temperature=1.0, seed=7 + index).text
        for prompt in PROMPTS[:2]
        for index in range(3)
    ]
    whole = served.ask(prompt=PROMPTS[:2], **drawn).json()
    assert [choice["text"] for choice in whole["choices"]] == expected
    lengths = [len(demo()[1](prompt).input_ids) for prompt in PROMPTS[:2]]
    assert whole["usage"]["prompt_tokens"] == sum(lengths)
    pieces = dict.fromkeys(range(6), "")
    for chunk in events_of(served.ask(prompt=PROMPTS[:2], **drawn, stream=True).text):
        (choice,) = chunk["choices"]
        pieces[choice["index"]] += choice["text"]
    assert list(pieces.values()) == expected


def test_an_echo_has_the_prompts_log_probabilities(served: Served) -> None:
    model, tokenizer = demo()
    fields = {"prompt": PROMPTS[:2], "max_tokens": 1, "logprobs": 2, "echo": True}
    choices = served.ask(**fields).json()["choices"]
    for prompt, choice in zip(PROMPTS[:2], choices, strict=True):
        assert choice["text"].startswith(prompt)
        ids = tokenizer(prompt).input_ids
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found = choice["logprobs"]
        first, *values = found["token_logprobs"]
        assert first is None and found["top_logprobs"][0] is None
        expected = [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]
        assert values[:-1] == pytest.approx(expected, abs=1e-4)
        assert values[-1] == pytest.approx(float(rows[-1].max()), abs=1e-4)
        assert all(len(top) == 2 for top in found["top_logprobs"][1:])
    plain = served.ask(prompt=PROMPTS[0], max_tokens=3, echo=True).json()["choices"][0]
    answer = served.ask(prompt=PROMPTS[0], max_tokens=3).json()["choices"][0]
    assert plain["text"] == PROMPTS[0] + answer["text"] and plain["logprobs"] is None


def test_a_bias_moves_tokens(served: Served) -> None:
    plain = served.ask(prompt=PROMPTS[0], max_tokens=9, return_token_ids=True).json()
    first = plain["choices"][0]["token_ids"][0]
    fields = {"prompt": PROMPTS[0], "max_tokens": 9, "return_token_ids": True}
    banned = served.ask(**fields, logit_bias={str(first): -100}).json()["choices"][0]["token_ids"]
    assert first not in banned
    alone = served.ask(**fields, logit_bias={"77": 100}, ignore_eos=True).json()
    assert alone["choices"][0]["token_ids"] == [77] * 9


def test_tokens_are_those_of_the_prompt(served: Served) -> None:
    tokenizer = demo()[1]
    found = served.ask("/tokenize", prompt=PROMPTS[0], temperature=None).json()
    ids = tokenizer(PROMPTS[0]).input_ids
    assert found == {"count": len(ids), "max_model_len": 3072, "tokens": ids}
    developer = [{"role": "developer", "content": "Be brief."}, *CHAT]
    system = [{"role": "system", "content": "Be brief."}, *CHAT]
    expected = tokenizer.apply_chat_template(system, add_generation_prompt=True, return_dict=False)
    found = served.ask("/tokenize", messages=developer, temperature=None).json()
    assert found["tokens"] == expected


def test_a_next_turn_reads_only_what_is_new() -> None:
    decoder = decoder_for("vanilla", *demo())
    with serving("recycling", batch_size=3) as served:
        chats = [[{"role": "user", "content": f"Tell me about {one}."}] for one in TOPICS]
        lengths = dict.fromkeys(range(len(chats)), 2)  # of the texts before
        for _ in range(3):  # several conversations, turn by turn
            for place, chat in enumerate(chats):
                body = served.ask("/v1/chat/completions", messages=chat, max_tokens=20).json()
                message = body["choices"][0]["message"]
                assert message["content"] == decoder.generate(chat, max_new_tokens=20).text
                # The end of a text may be other tokens within the next prompt.
                num_cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert num_cached >= lengths[place] - 2
                lengths[place] = body["usage"]["total_tokens"]
                chat += [message, {"role": "user", "content": "And then?"}]
        assert served.client.post("/reset_prefix_cache").status_code == 200
        body = served.ask("/v1/chat/completions", messages=chats[0][:-2], max_tokens=5).json()
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_reset_lets_the_method_forget() -> None:
    with serving("recycling-averaged") as served:
        fields = {"prompt": PROMPTS[0], "max_tokens": 30}

        def lengths() -> list[int]:
            return served.ask(**fields).json()["metrics"]["token_recycling"]["accept_lengths"]

        cold, warm = lengths(), lengths()
        assert len(warm) < len(cold), "what was learned helps"
        assert served.client.post("/reset_prefix_cache").status_code == 200
        assert lengths() == cold


def test_a_server_without_a_key_answers_this_machine_alone(served: Served) -> None:
    for host in ("localhost", "127.0.0.1:99", "[::1]:8000"):
        assert served.client.get("/v1/models", headers={"host": host}).status_code == 200
    for host in ("example.org", "10.0.0.7:8000"):
        reply = served.client.get("/v1/models", headers={"host": host})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "host"


def test_a_text_goes_on_past_its_end_if_asked(served: Served) -> None:
    decoder = decoder_for("vanilla", *demo())
    assert decoder.generate(PROMPTS[0], max_new_tokens=60).stop_reason == "eos"
    reply = served.ask(prompt=PROMPTS[0], max_tokens=60, ignore_eos=True).json()
    assert reply["usage"]["completion_tokens"] == 60


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ["a", 7]}, 400, "prompt.0"),
    ({"prompt": [99999]}, 400, "prompt"),
    ({"prompt": 7}, 400, "prompt"),
    ({}, 400, "prompt"),
    ({"prompt": "word " * 600}, 400, "prompt"),
    ({"prompt": "a" * 9000}, 413, "body"),
    ({"prompt": "a" * 2**22}, 413, "body"),  # more than a connection holds unread
    ({"prompt": "a", "model": "other"}, 404, "model"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 201}, 400, "max_tokens"),
    ({"prompt": "a", "seed": 2**64}, 400, "seed"),
    ({"prompt": "a", "stop": [""]}, 400, "stop.0"),
    ({"prompt": "a", "n": 0}, 400, "n"),
    ({"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"7": "much"}}, 400, "logit_bias.7"),
    ({"prompt": "a", "n": True}, 400, "n"),
    ({"prompt": "a", "echo": 1}, 400, "echo"),
    ({"prompt": ["a"] * 300}, 503, ""),
    ({"prompt": "a", "frequency_penalty": 3}, 400, "frequency_penalty"),
    ({"prompt": "a", "logprobs": 99}, 400, "logprobs"),
    ({"prompt": "a", "guided_regex": "a*"}, 400, "guided_regex"),
    ({"prompt": "a", "stream_options": {"what": True}, "stream": True}, 400, "stream_options.what"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages.0"),
    ({"messages": [*CHAT, {"content": "a"}]}, 400, "messages.1.role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content.0.type",
    ),
    ({"messages": CHAT, "reasoning_effort": "low"}, 400, "reasoning_effort"),
    ({"messages": CHAT, "tools": [{"type": "function"}]}, 400, "tools.0.function"),
    ({"messages": CHAT, "tool_choice": "required"}, 400, "tool_choice"),
    ({"messages": CHAT, "response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"prompt": "a", "prediction": {"type": "content"}}, 400, "prediction.content"),
    ({"messages": CHAT, "max_tokens": 1, "max_completion_tokens": 2}, 400, "max_completion_tokens"),
    ({"messages": CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
]


@pytest.mark.parametrize(("fields", "status", "param"), WRONG)
def test_a_wrong_request_is_refused_in_openais_form(
    served: Served, fields: dict[str, Any], status: int, param: str
) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    reply = served.ask(path, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param or None), error
    if param:
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"[" * 8000, b'{"prompt": "\\ud800"}', b"\xff\xfe", b'{"top_p": NaN}'],
)
def test_a_body_that_is_no_request_is_refused(served: Served, body: bytes) -> None:
    reply = served.client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_other_paths_methods_and_types_are_refused(served: Served) -> None:
    assert served.client.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    reply = served.client.post("/v1/responses", json={})
    assert reply.status_code == 404
    assert "allowed: POST /v1/chat/completions" in reply.json()["error"]["message"]
    assert served.client.get("/v1/completions").status_code == 405
    assert served.client.post("/v1/completions", data={"model": NAME}).status_code == 415


def test_a_client_that_leaves_frees_its_text(served: Served) -> None:
    fields = {"model": NAME, "temperature": 0, "prompt": PROMPTS[0], "max_tokens": 200}
    fields |= {"ignore_eos": True, "stream": True}
    thread = served.service.thread
    with served.client.stream("POST", "/v1/completions", json=fields) as reply:
        next(reply.iter_lines())
        assert len(thread._running) == 1
    wait_for(lambda: not thread._running)
    before = served.counters()["vllm:generation_tokens_total"]
    assert served.counters()["vllm:generation_tokens_total"] == before, "nothing is decoded for it"
    again = served.ask(prompt=PROMPTS[0], max_tokens=20)
    one = decoder_for("vanilla", *demo()).generate(PROMPTS[0], max_new_tokens=20)
    assert again.json()["choices"][0]["text"] == one.text


def test_a_key_is_asked_for() -> None:
    with serving("vanilla", api_key="secret") as served:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            reply = served.client.get("/v1/models", headers=headers)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
            assert "authorization: the key is missing or wrong" in reply.text
        assert served.ask(prompt="a").status_code == 401
        served.client.headers["authorization"] = "Bearer secret"
        assert served.ask(prompt="a", max_tokens=2).status_code == 200
        assert served.client.get("/v1/models").status_code == 200


def test_a_full_queue_refuses_and_a_failed_pass_ends_its_texts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving("vanilla", batch_size=2, max_queue=0) as served:
        batch = served.service.thread._batch
        step, is_refused = batch.step, threading.Event()
        steps = {1: count(), 2: count()}  # with so many texts

        def step_that_fails_at_last() -> list[Event]:
            if next(steps[len(batch)]) < 20:
                return step()
            if is_refused.is_set():
                raise ZeroDivisionError
            time.sleep(0.001)
            return []  # no text ends before both places were seen taken

        monkeypatch.setattr(batch, "step", step_that_fails_at_last)
        fields = {
            "model": NAME,
            "prompt": "a",
            "max_tokens": 900,
            "ignore_eos": True,
            "stream": True,
        }
        with (
            served.client.stream("POST", "/v1/completions", json=fields) as first,
            served.client.stream("POST", "/v1/completions", json=fields) as second,
        ):
            # Both are kept: a stream that nobody reads any more is closed, and its text leaves.
            lines, others = first.iter_lines(), second.iter_lines()
            next(lines), next(others)
            refused = served.ask(prompt="a")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
            is_refused.set()
            rest = [line for line in lines if line]
        assert "ZeroDivisionError" in rest[-2] and rest[-1] == "data: [DONE]"
        one = decoder_for("vanilla", *demo()).generate(PROMPTS[0], max_new_tokens=9)
        assert served.ask(prompt=PROMPTS[0], max_tokens=9).json()["choices"][0]["text"] == one.text
