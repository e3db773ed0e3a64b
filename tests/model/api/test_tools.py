"""Calls of functions: found in texts of each family however they are cut, told back to templates, and forced.

Run: pytest tests/model/api/test_tools.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")
pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from model.api.tools import HERMES, STYLES, CallReader, Tools, told_in_words
from tests.model.api.test_decoder import decoder_for, demo
from tests.model.serve.serving import Served, serving

HERMES_STYLE, MISTRAL, LLAMA, _ = STYLES
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Tells the time."}}
CALL = {"name": "weather", "arguments": {"city": "Rome", "days": 3}}
OTHER = {"name": "clock", "arguments": {}}
LLAMA_CALL = {"name": "weather", "parameters": CALL["arguments"]}
ASKED = [{"role": "user", "content": "How is the weather in Rome?"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("hybrid", batch_size=2) as it:
        yield it


class Named:
    """A tokenizer with a chat template."""

    def __init__(self, template: str) -> None:
        self.template = template

    def get_chat_template(self, tools: Any = None) -> str:
        return self.template


TEXTS = [
    (
        HERMES,
        f"Let me see.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
        "Let me see.\n",
        [CALL],
    ),
    (
        HERMES,
        f"<tool_call>{json.dumps(CALL)}</tool_call>\n<tool_call>{json.dumps(OTHER)}</tool_call> ok",
        "\n ok",
        [CALL, OTHER],
    ),
    (HERMES, "a < b <tool> c", "a < b <tool> c", []),
    (HERMES, "<tool_call>no JSON</tool_call>.", "<tool_call>no JSON</tool_call>.", []),
    (HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    (HERMES, "<tool_call>{", "<tool_call>{", []),
    (HERMES, f"<tool_call>{json.dumps(CALL)}", "", [CALL]),
    (MISTRAL, f" [{json.dumps(CALL)}, {json.dumps(OTHER)}]", " ", [CALL, OTHER]),
    (MISTRAL, "[1, 2] are numbers", "[1, 2] are numbers", []),
    (LLAMA, json.dumps(LLAMA_CALL), "", [CALL]),
    (LLAMA, f"It is {json.dumps(LLAMA_CALL)}", f"It is {json.dumps(LLAMA_CALL)}", []),
    (LLAMA, '{"name": "weather"', '{"name": "weather"', []),
    (LLAMA, "", "", []),
]


@pytest.mark.parametrize(("style", "text", "shown", "calls"), TEXTS)
def test_calls_are_found_wherever_a_text_is_cut(
    style: Any, text: str, shown: str, calls: list[Any]
) -> None:
    source = random.Random(1)
    for _ in range(60):
        cuts = sorted(source.choices(range(len(text) + 1), k=source.randrange(9)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        reader = CallReader(style)
        taken = [reader.take(part, False) for part in parts] + [reader.take("", True)]
        assert "".join(piece for piece, _ in taken) == shown
        found = [call for _, some in taken for call in some]
        assert [call["index"] for call in found] == list(range(len(calls)))
        assert len({call["id"] for call in found}) == len(calls)
        functions = [call["function"] for call in found]
        assert [{**one, "arguments": json.loads(one["arguments"])} for one in functions] == calls
    early = CallReader(style)
    assert not style.closing or early.take("Well, yes. ", False) == ("Well, yes. ", [])


def test_the_style_is_that_of_the_template() -> None:
    marks = {
        "{{ tools }}<tool_call>": HERMES,
        "{{ tools }}[TOOL_CALLS]": MISTRAL,
        '{{ tools }}{"name": .., "parameters": ..}': STYLES[3],
        "{{ tools }}<|python_tag|>": LLAMA,
        "{{ messages }}": HERMES,
    }
    for template, style in marks.items():
        assert Tools([WEATHER], Named(template)).style == style
    with pytest.raises(ValueError, match="tools: got them for a chat template"):
        Tools([WEATHER], Named("{{ tools }}<<call>>"))


@pytest.mark.parametrize("style", [HERMES, MISTRAL, LLAMA])
def test_a_forced_call_is_one_that_is_found(style: Any) -> None:
    tools = Tools([WEATHER, CLOCK], Named("{{ tools }}" + style.mark))
    model, tokenizer = demo()
    decoder = decoder_for("hybrid", model, tokenizer)
    for seed in range(3):
        words = {"temperature": 1.0, "seed": seed, "max_new_tokens": 80}
        output = decoder.generate("How is it?", grammar=tools.grammar("weather"), **words)
        shown, calls = CallReader(style).take(output.text, True)
        assert output.stop_reason == "eos" and not shown
        assert calls[0]["function"]["name"] == "weather"
        assert json.loads(calls[0]["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_messages_are_told_in_words_where_the_template_reads_no_tools() -> None:
    call = {"id": "1", "type": "function", "function": CALL}
    said = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
    ]
    first, *rest = told_in_words(said, [WEATHER])
    assert first["role"] == "system" and '"weather"' in first["content"]
    assert rest == [
        *ASKED,
        {"role": "assistant", "content": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"},
        {"role": "user", "content": "<tool_response>\nsun\n</tool_response>"},
    ]
    system = {"role": "system", "content": "Be short."}
    assert told_in_words([system, *ASKED], [WEATHER])[0]["content"].startswith(
        "Be short.\n\nYou may call"
    )


def test_the_library_tells_tools_in_words_or_says_that_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = demo()
    decoder = decoder_for("pld", model, tokenizer)
    plain, told = (decoder.generate(ASKED, max_new_tokens=3, tools=some) for some in ([], [CLOCK]))
    assert told.sequences.shape[1] > plain.sequences.shape[1]
    assert "Tells the time." in tokenizer.decode(told.sequences[0])
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[-1].content }}")
    with pytest.raises(ValueError, match="tools: the chat template reads neither tools nor the"):
        decoder.generate(ASKED, max_new_tokens=3, tools=[CLOCK])


def test_a_turn_with_a_tool_goes_through_the_server(served: Served) -> None:
    path, words = "/v1/chat/completions", {"tools": [WEATHER, CLOCK], "max_tokens": 80}
    forced = {"tool_choice": {"type": "function", "function": {"name": "weather"}}, **words}
    whole = served.ask(path, messages=ASKED, **forced).json()
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert json.loads(call["function"]["arguments"])["days"] <= 9 and "index" not in call
    lines = served.ask(path, messages=ASKED, stream=True, **forced).text.split("\n\n")[:-2]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    (streamed,) = [one for event in deltas for one in event["delta"].get("tool_calls", ())]
    assert streamed["function"] == call["function"] and streamed["index"] == 0
    assert deltas[-1]["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sun"}
    said = [*ASKED, {"role": "assistant", "tool_calls": [call]}, result]
    after = served.ask(path, messages=said, tool_choice="none", **words).json()
    assert after["choices"][0]["message"]["content"]
    shorter = served.ask(path, messages=said, max_tokens=80).json()
    assert after["usage"]["prompt_tokens"] == shorter["usage"]["prompt_tokens"], "tools were told"
    wrong = {"tool_choice": {"type": "function", "function": {"name": "other"}}}
    assert served.ask(path, messages=ASKED, **(words | wrong)).status_code == 400


def test_formats_and_predictions_are_served(served: Served) -> None:
    decoder = decoder_for("vanilla", *demo())
    schema = {"name": "trip", "schema": SCHEMA}
    for form, grammar in (
        ({"type": "json_schema", "json_schema": schema}, SCHEMA),
        ({"type": "json_object"}, {"type": "object"}),
    ):
        words: dict[str, Any] = {"temperature": 0.7, "seed": 3}
        reply = served.ask(prompt="A trip: ", max_tokens=30, response_format=form, **words).json()
        plain = decoder.generate("A trip: ", max_new_tokens=30, grammar=grammar, **words)
        assert reply["choices"][0]["text"] == plain.text and plain.text.startswith("{")
    text = decoder.generate("Tell me about rain.", max_new_tokens=40).text
    steps = []
    for content in (text, [{"type": "text", "text": "nothing like it"}]):
        prediction = {"type": "content", "content": content}
        served.ask("/reset_prefix_cache")
        reply = served.ask(prompt="Tell me about rain.", max_tokens=40, prediction=prediction)
        assert reply.json()["choices"][0]["text"] == text
        steps.append(reply.json()["metrics"]["token_recycling"]["num_steps"])
    assert steps[0] < steps[1]
