"""Asks with OpenAI's own client, streamed and not, in the environment of the clients: ADDRESS FILE LIMIT.

Prints a JSON object a question: text and acceptance, both ways.
"""

import json
import sys
from pathlib import Path

import openai

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
for wrong, kind in (({"model": "other"}, openai.NotFoundError), ({"n": 0}, openai.BadRequestError)):
    try:
        client.chat.completions.create(**{**words, **wrong})
    except kind as error:
        assert error.body["message"], error
    else:
        raise AssertionError(f"{wrong} was answered")
