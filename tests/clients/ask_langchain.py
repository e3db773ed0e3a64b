"""Asks with LangChain, in the environment of the clients: ADDRESS FILE LIMIT, then questions or tools.

Prints the answers to all questions, asked as a batch, as a JSON list.
"""

import json
import sys
from pathlib import Path
from typing import Literal

from known import TOOL, WISH, check
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

address, file, limit, what = sys.argv[1:]
words = {"base_url": address, "api_key": "none", "model": "demo", "temperature": 0}
chat = ChatOpenAI(**words, max_completion_tokens=int(limit))
asked = [json.loads(line) for line in Path(file).read_text().splitlines()]
if what == "questions":
    print(json.dumps([answer.content for answer in chat.batch([one["text"] for one in asked])]))
else:
    streamed = "".join(chunk.content for chunk in chat.stream(asked[0]["text"]))
    assert streamed == chat.invoke(asked[0]["text"]).content
    plain = OpenAI(**words, max_tokens=int(limit))  # asks with lists of prompts
    texts = plain.generate([one["prompt"] for one in asked]).generations
    assert [text[0].text for text in texts] == [plain.invoke(one["prompt"]) for one in asked]
    longer = ChatOpenAI(**words, max_completion_tokens=80)
    (call,) = longer.bind_tools([TOOL], tool_choice="required").invoke(WISH).tool_calls
    check(call["args"])

    class Trip(BaseModel):
        """A form."""

        city: Literal["Rome", "Oslo", "Lima"]
        is_far: bool

    form = longer.with_structured_output(Trip, method="json_schema")
    assert isinstance(form.invoke(WISH), Trip)
