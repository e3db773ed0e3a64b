"""Calls of functions: how models write them in their texts, by their chat templates, and what is made of them.

Three families are known by their templates: Hermes (Qwen and many more), Mistral and Llama. A model whose template
reads no tools gets them in words, and writes its calls as Hermes does. A call that is no JSON stays text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from .expected import SPACES

# Llama's models name the arguments of a call so; all others "arguments".
PARAMETERS = "parameters"
IN_WORDS = """

You may call one or more of these functions:
{tools}
For a call write its name and arguments as JSON:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a call looks: JSON between an opening and a closing, or all of an answer that begins with its letters."""

    mark: str  # in a chat template of this family
    opening: str
    closing: str = ""  # none: the end of the text
    arguments: str = "arguments"

    @property
    def is_all(self) -> bool:
        """Whether a call is all of the answer, and the opening its first letters."""
        return not self.closing


HERMES = CallStyle("<tool_call>", "<tool_call>", "</tool_call>")
STYLES = (
    HERMES,
    CallStyle("[TOOL_CALLS]", '[{"name"'),
    CallStyle("python_tag", '{"name"', arguments=PARAMETERS),
    CallStyle(f'"{PARAMETERS}"', '{"name"', arguments=PARAMETERS),
)


def reads_tools(template: str) -> bool:
    return "tools" in template


def told_in_words(
    messages: Sequence[Mapping[str, Any]], functions: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return messages for a template that reads no tools: functions, calls and results are told in words."""
    first, *rest = messages
    if first["role"] != "system":
        first, rest = {"role": "system", "content": ""}, list(messages)
    schemas = [get_json_schema(one) if callable(one) else one for one in functions]
    words = IN_WORDS.format(tools="\n".join(map(json.dumps, schemas)))
    said: list[dict[str, Any]] = [{**first, "content": (first["content"] + words).strip()}]
    for message in rest:
        calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
        text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        role, content = message["role"], message.get("content")
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        said.append({"role": role, "content": "\n".join(filter(None, (content, text)))})
    return said


class Tools:
    """The functions of a request, and how the model of a tokenizer calls them.

    Raises:
        ValueError: if the form in which its template writes calls is not known.
    """

    def __init__(self, functions: Sequence[dict[str, Any]], tokenizer: Any) -> None:
        self._functions = functions
        template = tokenizer.get_chat_template(tools=list(functions) or None)
        found = [style for style in STYLES if style.mark in template]
        if not reads_tools(template):
            found = [HERMES]
        if not found:
            raise ValueError(
                "tools: got them for a chat template that writes calls in no known form; allowed: that of Hermes, "
                "Mistral or Llama"
            )
        self.style = found[0]

    def grammar(self, name: str | None) -> str:
        """Return the grammar of a text that calls the function of a name; None: any one."""
        allowed = [one["function"] for one in self._functions]
        if name is not None:
            allowed = [one for one in allowed if one["name"] == name]
        if not allowed:
            raise ValueError(f"tool_choice: got {name!r}; allowed: the name of a function in tools")
        calls = [self._call_schema(one) for one in allowed]
        schema = json.dumps({"x-guidance": SPACES, "anyOf": calls})
        opening, closing = f"{self.style.opening}\n", f"\n{self.style.closing}"
        if self.style.is_all:
            is_list = self.style.opening.startswith("[")
            opening, closing = ("[", "]") if is_list else ("", "")
        return f"start: {json.dumps(opening)} call {json.dumps(closing)}\ncall: %json {schema}"

    def _call_schema(self, function: dict[str, Any]) -> dict[str, Any]:
        given = function.get(PARAMETERS) or {"type": "object"}
        parts = {"name": {"const": function["name"]}, self.style.arguments: given}
        fixed = {"required": list(parts), "additionalProperties": False}
        return {"type": "object", "properties": parts, **fixed}


class CallReader:
    """Takes the calls out of a text that arrives in pieces."""

    def __init__(self, style: CallStyle) -> None:
        self._style, self._held = style, ""
        self.num_calls = 0
        self._may_begin = True  # a call that is all of an answer

    def take(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return the text beside calls, and the calls, that a piece completes, as OpenAI's."""
        self._held += text
        shown, calls = "", list[dict[str, Any]]()
        while self._held:
            begin = self._begin()
            if begin is None:
                break
            shown, self._held = shown + self._held[:begin], self._held[begin:]
            whole = self._whole(is_last)
            if whole is None:
                break
            found = self._calls(whole)
            calls += found
            shown += "" if found else whole
            self._held = self._held[len(whole) :]
        if is_last:
            shown, self._held = shown + self._held, ""
        elif self._begin() is None:
            num_kept = self._num_open()
            end = len(self._held) - num_kept
            shown, self._held = shown + self._held[:end], self._held[end:]
        return shown, calls

    def _begin(self) -> int | None:
        """Return where a call begins in what is held; None: nowhere."""
        place = self._held.find(self._style.opening)
        if self._style.is_all and self._held[:place].strip():
            place = -1
        return None if place < 0 or not self._may_begin else place

    def _num_open(self) -> int:
        """Return how many of the last letters may begin a call."""
        opening, held = self._style.opening, self._held
        if self._style.is_all:
            is_open = self._may_begin and opening.startswith(held.lstrip())
            self._may_begin = is_open
            return len(held) if is_open else 0
        sizes = range(min(len(opening) - 1, len(held)), 0, -1)
        return next((size for size in sizes if opening.startswith(held[-size:])), 0)

    def _whole(self, is_last: bool) -> str | None:
        """Return a call from its opening to its closing; None while it is open."""
        if self._style.is_all:
            return self._held if is_last else None
        body, closing, _ = self._held.partition(self._style.closing)
        return body + closing if closing or is_last else None

    def _calls(self, whole: str) -> list[dict[str, Any]]:
        """Return the calls in a text; none if it is no JSON of calls."""
        if not self._style.is_all:
            whole = whole.removeprefix(self._style.opening).removesuffix(self._style.closing)
        try:
            found = json.loads(whole)
            calls = found if isinstance(found, list) else [found]
            named = [(one["name"], one.get("arguments", one.get(PARAMETERS, {}))) for one in calls]
        except (ValueError, KeyError, TypeError, AttributeError):
            return []
        made = []
        for name, arguments in named:
            function = {"name": name, "arguments": json.dumps(arguments)}
            head = {"index": self.num_calls, "id": f"call_{uuid.uuid4().hex[:24]}"}
            made.append({**head, "type": "function", "function": function})
            self.num_calls += 1
        return made
