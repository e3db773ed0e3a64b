"""Requests of OpenAI's API, checked field by field, and errors in its form.

A field that would change the answer and is not served is refused unless it has the value that changes nothing.
`null` is a field left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ..options import temperature_of

# Fields that change no token: for accounts, caches and logs of services.
IGNORED = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls", "request_id", "priority"),
    )
)
# Fields that are not served, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "length_penalty": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "prompt_logprobs": (0,),
}
# As OpenAI's, where a completion names no limit.
COMPLETION_TOKENS = 16


StopString = Annotated[str, Field(min_length=1)]


class Refusal(Exception):
    """A request that is not answered.

    Its text is a line that begins with the field that is wrong; the status is HTTP's, the code a word for programs.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self._code = status, code

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error."""
        field, colon, _ = str(self).partition(":")
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "code": self._code}
        is_field = colon and all(part.isidentifier() or part.isdigit() for part in field.split("."))
        return {"error": {**error, "param": field if is_field else None}}


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _served(cls, values: Any) -> Any:
        """Leave out what changes nothing."""
        if not isinstance(values, dict):
            return values
        left = {}
        for name, value in values.items():
            allowed = () if name in cls.model_fields else NEUTRAL.get(name, ())
            # 1 == True, which is no number here
            if any(value == one and type(value) in (type(one), float) for one in allowed):
                continue
            if allowed and value is not None:
                raise ValueError(f"{name}: is not supported; allowed: {allowed[0]!r}, or left out")
            if value is not None and name not in IGNORED:
                left[name] = value
        return left


class StreamOptions(_Fields):
    """What a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage in every chunk
    include_obfuscation: bool = False  # OpenAI's padding, of which there is none


class SchemaFields(_Fields):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool = True


class ResponseFormat(_Fields):
    """The form of an answer: JSON of a schema, or any object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFields | None = None

    @property
    def grammar(self) -> dict[str, Any] | None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise Refusal(
                "response_format.json_schema: belongs to the type json_schema, and to it alone"
            )
        of_type = {"text": None, "json_object": {"type": "object"}}
        return self.json_schema.schema_ if self.json_schema else of_type[self.type]


class TextPart(_Fields):
    type: Literal["text"]
    text: str


def text_of(content: str | Sequence[TextPart]) -> str:
    """Return the text of a content, which may come in parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class PredictedContent(_Fields):
    """A text that the answer probably resembles."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return text_of(self.content)


class TextFields(_Fields):
    """The fields that both kinds of requests have."""

    model: str
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # vLLM's; -1 and 0 are all tokens
    min_p: float = Field(0.0, ge=0, le=1)  # vLLM's, as the next three
    repetition_penalty: float = Field(1.0, gt=0)
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: list[int] = []
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[Annotated[int, Field(strict=False)], float] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] = []
    response_format: ResponseFormat = ResponseFormat(type="text")
    prediction: PredictedContent | None = None
    ignore_eos: bool = False  # vLLM's
    return_token_ids: bool = False  # vLLM's

    @property
    def stop_strings(self) -> list[str]:
        """Strings before which the text ends."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


class CalledFunction(_Fields):
    name: str
    arguments: str


class ToolCall(_Fields):
    id: str = ""
    index: int = 0
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as a chat template takes it: arguments that are JSON are told as what they say."""
        arguments: Any = self.function.arguments
        with suppress(ValueError):
            arguments = json.loads(arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(_Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise PydanticCustomError("content", "needs content, or tool_calls of the assistant")
        return self

    @property
    def text(self) -> str:
        return text_of(self.content)

    def for_template(self) -> dict[str, Any]:
        """Return the message as a chat template takes it, in which developers are the system."""
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": self.text}
        if self.tool_calls:
            found["tool_calls"] = [call.for_template() for call in self.tool_calls]
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        return found | {name: value for name, value in named.items() if value is not None}


class FunctionFields(_Fields):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Tool(_Fields):
    type: Literal["function"]
    function: FunctionFields


class NamedFunction(_Fields):
    name: str


class NamedTool(_Fields):
    type: Literal["function"]
    function: NamedFunction


class ChatFields(_Fields):
    """The messages of a chat, and what its template reads beside them."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None

    @property
    def prompts(self) -> list[list[ChatMessage]]:
        return [self.messages]

    @property
    def functions(self) -> list[dict[str, Any]]:
        """Tools that the answer may call, as chat templates take them."""
        given = [] if self.tool_choice == "none" else self.tools
        return [one.model_dump(exclude_defaults=True) for one in given]


class ChatRequest(ChatFields, TextFields):
    """A request for the next answer of a chat."""

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def limit(self) -> int | None:
        """Most new tokens; None if the request does not say."""
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise Refusal("max_completion_tokens: differs from max_tokens; give one of them")
        return both.pop() if both else None

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told for each token; None: no log-probability at all."""
        if self.top_logprobs and not self.logprobs:
            raise Refusal("top_logprobs: needs logprobs: true")
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(TextFields):
    """A request to go on with a text."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def limit(self) -> int | None:
        return self.max_tokens or COMPLETION_TOKENS

    @property
    def prompts(self) -> Sequence[Any]:
        """The texts, or their token ids."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        return [prompt] if is_one else prompt

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeText(_Fields):
    """A text whose tokens are asked for, as vLLM's `/tokenize`."""

    model: str
    prompt: str

    @property
    def prompts(self) -> list[str]:
        return [self.prompt]


class TokenizeChat(ChatFields):
    """Messages whose tokens are asked for."""

    model: str


TextRequest: TypeAlias = ChatRequest | CompletionRequest
TokenizeRequest: TypeAlias = TokenizeText | TokenizeChat
Request = TypeVar("Request", bound=_Fields)


def parse_request(kind: type[Request], body: bytes) -> Request:
    """Return the request in a body of JSON; raises a Refusal that names the first field that is wrong."""
    try:
        request = kind.model_validate_json(body)
        if isinstance(request, TextFields):
            temperature_of(request.temperature or 0)
    except ValidationError as error:
        # Of a value that may have several types, the one that fits furthest.
        errors = error.errors(include_url=False)
        first = max(errors, key=lambda one: len(_place(one["loc"], one["type"], body).split(".")))
        field = _place(first["loc"], first["type"], body)
        raise Refusal(_line(field, first["type"], first["msg"], first["input"])) from error
    except ValueError as error:
        raise Refusal(str(error)) from error
    return request


def _place(loc: Sequence[int | str], kind: str, body: bytes) -> str:
    """Return where in a body something is wrong, such as `messages.0.content`: without the names of types."""
    found: list[str] = []
    value: Any = json.loads(body) if kind != "json_invalid" else None
    for part in loc:
        is_in = isinstance(value, dict) and part in value
        if is_in or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
            found.append(str(part))
    if kind == "missing" and found[-1:] != [str(loc[-1])]:
        found.append(str(loc[-1]))
    return ".".join(found) or "body"


def _line(field: str, kind: str, message: str, given: Any) -> str:
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind == "missing":
        return f"{field}: is missing"
    if kind == "extra_forbidden":
        return f"{field}: is not supported here, and might change the answer; leave it out"
    shown = repr(given)
    return f"{field}: {message}; got {shown if len(shown) <= 60 else shown[:60] + '...'}"
