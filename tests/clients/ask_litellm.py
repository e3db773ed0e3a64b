"""Asks with LiteLLM, in the environment of the clients: ADDRESS FILE LIMIT, then questions or tools.

Prints the answers to all questions as a JSON list.
"""

import json
import sys
from pathlib import Path

import litellm
from known import SCHEMA, TOOL, WISH, check

address, file, limit, what = sys.argv[1:]
words = {"api_base": address, "api_key": "none", "temperature": 0}
asked = [json.loads(line) for line in Path(file).read_text().splitlines()]


def ask(text: str, **more: object) -> litellm.ModelResponse:
    """Ask one question of the chat."""
    messages = [{"role": "user", "content": text}]
    given = {"max_completion_tokens": int(limit), **words, **more}
    return litellm.completion(model="openai/demo", messages=messages, **given)


if what == "questions":
    print(json.dumps([ask(one["text"]).choices[0].message.content for one in asked]))
else:
    text = asked[0]["text"]
    parts = [chunk.choices[0].delta.content or "" for chunk in ask(text, stream=True)]
    assert "".join(parts) == ask(text).choices[0].message.content
    prompt = asked[0]["prompt"]
    given = {"model": "text-completion-openai/demo", "max_tokens": int(limit), **words}
    assert litellm.text_completion(prompt=prompt, **given).choices[0].text
    longer = {"max_completion_tokens": 80}
    (call,) = (
        ask(WISH, tools=[TOOL], tool_choice="required", **longer).choices[0].message.tool_calls
    )
    check(json.loads(call.function.arguments))
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    check(json.loads(ask(WISH, response_format=form, **longer).choices[0].message.content))
