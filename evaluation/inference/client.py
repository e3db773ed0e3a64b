"""An OpenAI-compatible server: where it is, and one request to it, streamed and timed.

Works with vLLM, SGLang, llama.cpp and `model.serve`. Token ids are asked for as vLLM gives them
(`return_token_ids`); a server that refuses the key is asked without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

from evaluation.inference.config import DecodingOptions
from model.commands.command_line import UserError, first_line
from model.options import Options, option

SCHEMES = ("http://", "https://")
TOKEN_IDS = "return_token_ids"
# Bytes of an error's text that are shown.
LONGEST_CAUSE = 300
# A sample of /metrics in Prometheus' text form: name, labels in braces or none, value.
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([-+.\deE]+)")
# What vLLM counts there, by the names of its per-request metrics.
COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "num_spec_steps",
    "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_draft_tokens",
}
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EndpointConfig(Options):
    """Where a server is, and what is asked of it."""

    base_url: str = option(
        "", "address of an OpenAI-compatible server, such as http://127.0.0.1:8000", metavar="URL"
    )
    served_model: str | None = option(
        None, "name of the model there (default: the one that /v1/models lists)"
    )
    api_key_env: str | None = option(
        None, "environment variable that holds the API key (default: no key)"
    )
    timeout: int = option(600, "seconds that the server may be silent", least=1)

    def _check(self) -> None:
        if not self.base_url.startswith(SCHEMES):
            raise ValueError(
                f"base_url: got {self.base_url!r}; allowed: an address such as http://127.0.0.1:8000"
            )
        object.__setattr__(self, "base_url", self.base_url.rstrip("/").removesuffix("/v1"))

    @property
    def api_key(self) -> str | None:
        """The key; a `UserError` if the variable is not set."""
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env)):
            raise UserError(
                f"api_key_env: got {self.api_key_env}, which is not set; export it, or leave the option out"
            )
        return key


class EndpointError(Exception):
    """A request failed; its text says why in one line."""


@dataclass(slots=True)
class ServerReply:
    """The answer to one request, by the names of a choice's lists; times are seconds from its begin."""

    turns: str = ""  # the text
    new_tokens: int = 0
    wall_time: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, from the server's prefix cache
    time_to_first_token: float = 0.0
    chunk_times: list[float] = field(default_factory=list)  # of every piece that arrived
    stop_reasons: str | None = None
    # [name, arguments] of each call, arguments as the text that was generated.
    tool_calls: list[list[str]] = field(default_factory=list)
    reasoning: str = ""
    token_ids: list[int] | None = None
    speculative_decoding: dict[str, Any] | None = None  # as in vLLM's metrics
    accept_lengths: list[int] | None = None  # of every step, as our own server gives them


class Client:
    """A server that was reached; a `UserError` if it cannot be, or does not list the model.

    Attributes:
        model: the name of the model there.
        gives_token_ids: whether it takes `return_token_ids`.
    """

    def __init__(self, config: EndpointConfig) -> None:
        try:
            import httpx  # imported late: an extra
        except ImportError:
            raise UserError(
                "endpoints need httpx, which is not installed; pip install httpx"
            ) from None
        self._httpx = httpx
        self.url = config.base_url
        key = config.api_key
        self._http = self._httpx.Client(
            base_url=config.base_url,
            timeout=config.timeout,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=self._httpx.Limits(max_connections=None),
        )
        self.model = self._model(config.served_model)
        self.gives_token_ids = True

    def counters(self) -> dict[str, int]:
        """Return the counters of drafting at /metrics; empty if there are none."""
        try:
            page = self._http.get("/metrics")
        except self._httpx.HTTPError:
            return {}
        return read_counters(page.text) if page.status_code == 200 else {}

    def reset(self) -> bool:
        """Let the server forget what it learned and cached (vLLM's path); return whether it says that it did."""
        try:
            return bool(self._http.post("/reset_prefix_cache").status_code == 200)
        except self._httpx.HTTPError:
            return False

    def reply(
        self,
        messages: Sequence[Message],
        sampling: DecodingOptions,
        seed: int | None = None,
        tools: Sequence[Any] = (),
        fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> ServerReply:
        """Ask for the next message; an `EndpointError` if the server refuses or breaks off."""
        body = {"model": self.model, "messages": list(messages), **_options(sampling, seed)}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"tools": list(tools), **fields} if tools else dict(fields)
        if self.gives_token_ids:
            try:
                return self._stream(body | {TOKEN_IDS: True})
            except EndpointError as error:
                if TOKEN_IDS not in str(error):
                    raise
                self.gives_token_ids = False
        return self._stream(body)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON answer to a request that is not streamed; errors as `reply`."""
        try:
            answer = self._http.post(path, json=body)
        except self._httpx.HTTPError as error:
            raise self._failure(error) from error
        return _json(answer.text) if answer.status_code == 200 else self._refused(answer)

    def _stream(self, body: Mapping[str, Any]) -> ServerReply:
        reply, is_whole = ServerReply(), False
        start = time.perf_counter()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    self._refused(answer)
                for data in _events(answer.iter_bytes()):
                    if data == "[DONE]":
                        is_whole = True
                    elif _add(_json(data), reply):
                        reply.chunk_times.append(time.perf_counter() - start)
        except self._httpx.HTTPError as error:
            raise self._failure(error) from error
        if not is_whole or not reply.new_tokens:
            lacks = "its usage" if is_whole else "data: [DONE]"
            raise EndpointError(f"endpoint {self.url}: the stream ended without {lacks}")
        times = reply.chunk_times
        reply.wall_time = times[-1] if times else time.perf_counter() - start
        reply.time_to_first_token = times[0] if times else reply.wall_time
        reply.chunk_times = [round(seconds, 6) for seconds in times]
        # As Spec-Bench's commands keep and repeat an answer; the spaces around it differ between servers.
        reply.turns = reply.turns.strip()
        return reply

    def _model(self, given: str | None) -> str:
        try:
            answer = self._http.get("/v1/models")
        except self._httpx.HTTPError as error:
            raise UserError(
                f"{self._failure(error)}; start the server, or give another address"
            ) from error
        try:
            names = [str(one["id"]) for one in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"endpoint {self.url}: /v1/models answers {answer.status_code} without a list of models; give "
                "the address of an OpenAI-compatible server, or its API key (--api-key-env)"
            ) from None
        has = f"{self.url} has {', '.join(names) or 'no model'}"
        if given is None and len(names) != 1:
            raise UserError(f"served_model: got none; {has}; name one")
        if given is not None and given not in names:
            raise UserError(f"served_model: got {given}; {has}")
        return given or names[0]

    def _refused(self, answer: Any) -> Any:
        cause = " ".join(answer.text.split())[:LONGEST_CAUSE]
        with contextlib.suppress(ValueError, KeyError, TypeError):  # of another form than OpenAI's
            cause = str(answer.json()["error"]["message"])[:LONGEST_CAUSE]
        raise EndpointError(f"endpoint {self.url}: HTTP {answer.status_code}: {cause}")

    def _failure(self, error: Exception) -> EndpointError:
        what = "no answer in time" if isinstance(error, self._httpx.TimeoutException) else ""
        return EndpointError(f"endpoint {self.url}: {what or first_line(error)}")


def _options(sampling: DecodingOptions, seed: int | None) -> dict[str, Any]:
    """Return a run's options as the keys of a request; those with a default only where they have another value."""
    keys = {
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, 0),
        "min_p": (sampling.min_p, 0.0),
        "repetition_penalty": (sampling.repetition_penalty, 1.0),
        "stop": (list(sampling.stop), []),
        "seed": (seed if sampling.temperature else None, None),
    }
    given = {key: value for key, (value, default) in keys.items() if value != default}
    return {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, **given}


def _events(parts: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each line of a stream of server-sent events.

    Lines end with a newline alone: JSON may hold further characters that Python takes for the end of a line.
    """
    rest = b""
    for part in chain(parts, [b"\n"]):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").decode("utf-8", "replace").strip()


def _json(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EndpointError(f"the server sent no JSON object: {text[:LONGEST_CAUSE]!r}")
    return found


def _add(chunk: dict[str, Any], reply: ServerReply) -> bool:
    """Add a piece of a stream to the reply; return whether it held a part of the answer."""
    is_error = chunk.get("object") == "error" or ("message" in chunk and "choices" not in chunk)
    error = chunk if is_error else chunk.get("error")
    if error:
        cause = error.get("message", error) if isinstance(error, dict) else error
        raise EndpointError(f"the stream broke off: {str(cause)[:LONGEST_CAUSE]}")
    if usage := chunk.get("usage"):
        reply.prompt_tokens = usage.get("prompt_tokens") or 0
        reply.new_tokens = usage.get("completion_tokens") or 0
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    metrics = chunk.get("metrics") or {}
    if spec := metrics.get("speculative_decoding"):
        reply.speculative_decoding = spec
    if own := metrics.get("token_recycling"):
        reply.accept_lengths = own["accept_lengths"]
    return any([_add_choice(choice, reply) for choice in chunk.get("choices") or ()])


def _add_choice(choice: Mapping[str, Any], reply: ServerReply) -> bool:
    delta = choice.get("delta") or {}
    reply.stop_reasons = choice.get("finish_reason") or reply.stop_reasons
    ids = choice.get("token_ids")
    if ids:
        reply.token_ids = [*(reply.token_ids or ()), *ids]
    text = _text(delta.get("content"))
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    reply.turns += text
    reply.reasoning += thought
    calls = delta.get("tool_calls") or ()
    for place, call in enumerate(calls):
        function = call.get("function") or {}
        index = place if call.get("index") is None else call["index"]
        while len(reply.tool_calls) <= index:
            reply.tool_calls.append(["", ""])
        reply.tool_calls[index][0] += function.get("name") or ""
        reply.tool_calls[index][1] += function.get("arguments") or ""
    return bool(ids or text or thought or calls)


def _text(content: Any) -> str:
    """Return the text of a message's content, which may come in parts."""
    parts = content if isinstance(content, list) else [content]
    return "".join(
        (part.get("text") or "") if isinstance(part, dict) else (part or "") for part in parts
    )


def read_counters(text: str) -> dict[str, int]:
    """Return the counters of drafting in a page of /metrics, summed over labels; empty if it has none."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        if (sample := SAMPLE.match(line)) and (name := COUNTERS.get(sample[1])):
            found[name] = found.get(name, 0) + int(float(sample[2]))
    return found if len(found) == len(COUNTERS) else {}
