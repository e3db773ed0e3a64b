"""Asks with OpenAI's own client, streamed and not, in the environment of the clients: ADDRESS FILE LIMIT.

Prints a JSON object a question: text and acceptance, both ways. Then functions are called, a form is filled in by
`parse`, a text is predicted, and what is wrong is refused.
"""

import json
import sys
from pathlib import Path
from typing import Literal

import openai
from known import TOOL, WISH, check
from pydantic import BaseModel

address, file, limit = sys.argv[1:]
client = openai.OpenAI(base_url=address, api_key="none")
(model,) = [one.id for one in client.models.list()]
for line in Path(file).read_text().splitlines():
    text = json.loads(line)["text"]
    words = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0}
    words["max_completion_tokens"] = int(limit)
    whole = client.chat.completions.create(**words)
    stream = client.chat.completions.create(
        **words, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    found = {
        "text": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "metrics": whole.metrics["speculative_decoding"],
        "streamed_metrics": last.metrics["speculative_decoding"],
        "tokens": whole.usage.completion_tokens,
    }
    print(json.dumps(found))
prompt = client.completions.create(model=model, prompt="A boat", max_tokens=5, temperature=0)
assert prompt.choices[0].text and prompt.usage.completion_tokens == 5
several = client.chat.completions.create(**words, n=2)
assert len({choice.message.content for choice in several.choices}) == 1, several
assert len(several.choices) == 2, several
predicted = {"type": "content", "content": whole.choices[0].message.content}
again = client.chat.completions.create(**words, prediction=predicted)
assert again.choices[0].message.content == whole.choices[0].message.content, again

asked = {"model": model, "messages": [{"role": "user", "content": WISH}], "temperature": 0}
asked |= {"tools": [TOOL], "tool_choice": "required", "max_completion_tokens": 80}
answer = client.chat.completions.create(**asked)
(call,) = answer.choices[0].message.tool_calls
check(json.loads(call.function.arguments))
assert answer.choices[0].finish_reason == "tool_calls", answer
with client.chat.completions.stream(**asked) as events:
    (streamed,) = events.get_final_completion().choices[0].message.tool_calls
assert streamed.function.arguments == call.function.arguments
said = [*asked["messages"], answer.choices[0].message.model_dump(exclude_none=True)]
said.append({"role": "tool", "tool_call_id": call.id, "content": "sun, 21 degrees"})
last = client.chat.completions.create(**asked | {"messages": said, "tool_choice": "none"})
assert last.choices[0].message.content, last


class Trip(BaseModel):
    """A form."""

    city: Literal["Rome", "Oslo", "Lima"]
    is_far: bool


parsed = client.chat.completions.parse(**words, response_format=Trip)
assert isinstance(parsed.choices[0].message.parsed, Trip), parsed
for wrong, kind in (({"model": "other"}, openai.NotFoundError), ({"n": 0}, openai.BadRequestError)):
    try:
        client.chat.completions.create(**{**words, **wrong})
    except kind as error:
        assert error.body["message"], error
    else:
        raise AssertionError(f"{wrong} was answered")
