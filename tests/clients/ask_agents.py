"""Runs an agent of OpenAI's Agents SDK, in the environment of the clients: ADDRESS.

Its loop: the model must call a function, the function runs, its result goes back, the model answers. Prints what
the function was asked and the last answer.
"""

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from known import WISH, check
from openai import AsyncOpenAI

calls = []


@function_tool
def weather(city: Literal["Rome", "Oslo", "Lima"], days: Literal[1, 2, 3]) -> str:
    """Tells the weather."""
    calls.append({"city": city, "days": days})
    return f"{city}: sun for {days} days, 21 degrees"


set_tracing_disabled(True)
client = AsyncOpenAI(base_url=sys.argv[1], api_key="none")
settings = ModelSettings(temperature=0, max_tokens=80, tool_choice="required")
agent = Agent(
    name="weather",
    instructions="Answer with the function's help.",
    model=OpenAIChatCompletionsModel(model="demo", openai_client=client),
    model_settings=settings,
    tools=[weather],
)
result = asyncio.run(Runner.run(agent, WISH, max_turns=4))
for call in calls:
    check(call)
assert calls and isinstance(result.final_output, str), result
kinds = [item.type for item in result.new_items]
assert kinds[:2] == ["tool_call_item", "tool_call_output_item"], kinds
print(json.dumps({"calls": calls, "answer": result.final_output, "items": kinds}))
