"""Trajectories of messages, in the forms that agents store them, as OpenAI's messages of today.

Content may come in parts, calls as today's `tool_calls` or the older `function_call`, their arguments as a text, an
object, a text of a text, or not at all, and tools with or without "function" around them.
"""

from __future__ import annotations

import json
from typing import Any

from model.commands.command_line import UserError

Row = dict[str, Any]
# OpenAI's roles of the model, and of what a called function gave.
ASSISTANT, TOOL, OLD_TOOL = "assistant", "tool", "function"


def asked_places(messages: list[Row] | tuple[Row, ...]) -> list[int]:
    """Return the places of the assistant's messages that answer others: not of one that begins."""
    return [place for place, one in enumerate(messages) if one["role"] == ASSISTANT and place]


def todays_messages(messages: list[Row], where: str) -> list[Row]:
    """Return messages in today's form; a `UserError` that says where names what cannot be read."""
    found: list[Row] = []
    last_id = ""
    for place, message in enumerate(messages):
        here = f"{where}, message {place}"
        one = dict(message)
        text_of(one.get("content"), here)
        if old := one.pop("function_call", None):
            one["tool_calls"] = [{"id": f"call_{place}", "function": old}, *_calls(one, here)]
        if calls := _calls(one, here):
            one["tool_calls"] = [_call(call, f"{here}, call {at}") for at, call in enumerate(calls)]
            last_id = str(one["tool_calls"][-1].get("id", ""))
        if one["role"] == OLD_TOOL:
            one |= {"role": TOOL, "tool_call_id": last_id}
        found.append(one)
    return found


def todays_tools(tools: Any, where: str) -> list[Row]:
    """Return tools in today's form; errors as `todays_messages`."""
    found = []
    for place, tool in enumerate(tools or ()):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f"{where}, tool {place}: got {str(tool)[:60]}; allowed: a function with a name"
            )
        own = {key: value for key, value in function.items() if key != "type"}
        found.append(tool if function is not tool else {"type": "function", "function": own})
    return found


def text_of(content: Any, where: str = "message") -> str:
    """Return the text of a message, whose content may come in parts; a `UserError` for a part that is no text."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = []
    for part in content:
        if not isinstance(part, dict | str) or (isinstance(part, dict) and "text" not in part):
            raise UserError(
                f"{where}: content: got {str(part)[:60]}; allowed: texts, and parts that have one"
            )
        texts.append(part if isinstance(part, str) else part["text"] or "")
    return "".join(texts)


def arguments_of(text: str) -> Any:
    """Return a call's arguments as the object that chat templates take; a text that is no JSON as it is."""
    try:
        return json.loads(text) if text else {}
    except ValueError:  # generated, so that it need not be JSON
        return text


def _calls(message: Row, where: str) -> list[Any]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise UserError(f"{where}: tool_calls: got {str(calls)[:60]}; allowed: a list of calls")
    return calls


def _call(call: Any, where: str) -> Row:
    """Return a call with its arguments as one JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: got {str(call)[:60]}; allowed: a call of a function with a name")
    given = function.get("arguments")
    text = given if isinstance(given, str) else json.dumps({} if given is None else given)
    inner = arguments_of(text)
    if isinstance(inner, str) and isinstance(arguments_of(inner), dict):  # coded twice
        text = inner
    own = {"name": function["name"], "arguments": text or "{}"}
    rest = (
        {} if function is call else {key: value for key, value in call.items() if key != "function"}
    )
    return {"type": "function", **rest, "function": own}
