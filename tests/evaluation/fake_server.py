"""A small OpenAI-compatible server for tests: its answers are a function of the messages, a token is a word."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Message = dict[str, Any]


def echo(messages: list[Message]) -> str:
    """Return an answer that depends on the whole conversation."""
    return f"{len(messages)} messages, the last of {len(messages[-1]['content'].split())} words."


@dataclass
class Behaviour:
    """What the server does; tests change it. Words are ids by their place in `vocabulary`."""

    answer: Callable[[list[Message]], str] = echo
    tool_calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments
    models: list[str] = field(default_factory=lambda: ["fake"])
    gives_token_ids: bool = True
    step: int = 2  # words that each chunk holds: one is the target's, the others accepted drafts
    metrics: bool = True  # in the response
    counters: bool = False  # at /metrics
    cached_tokens: int = 0
    past_the_end: int = 0  # accepted drafts that are counted and not sent
    own_lengths: list[int] = field(default_factory=list)  # of steps, as our own server gives them
    # Events in odd forms: no space after the colon, cut anywhere, content in parts, and without counts.
    is_odd: bool = False
    error: dict[str, Any] | None = None  # an event in place of the end
    status: int = 200
    breaks_off: bool = False
    api_key: str | None = None
    # Of each word [before, after]: the words that could stand there, with their logprobs.
    logprobs: Callable[[list[str], int], dict[str, float]] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    most_at_a_time: int = 0
    vocabulary: dict[str, int] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)
    num_under_way: int = 0
    num_accepted: int = 0
    num_drafts: int = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour: Behaviour

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        it = self.behaviour
        if self.path == "/v1/models":
            self._send({"object": "list", "data": [{"id": name} for name in it.models]})
        elif self.path == "/metrics" and it.counters:
            names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            values = (it.num_drafts, it.num_drafts * (it.step - 1), it.num_accepted)
            lines = [
                f'vllm:spec_decode_{name}_total{{model_name="fake"}} {value:.1f}'
                for name, value in zip(names, values, strict=True)
            ]
            self._send("# HELP some\n" + "\n".join(lines) + "\n")
        else:
            self._send({"error": {"message": "no such page"}}, 404)

    def do_POST(self) -> None:
        it = self.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        it.requests.append(body)
        refused = "return_token_ids" in body and not it.gives_token_ids
        if it.api_key and self.headers.get("Authorization") != f"Bearer {it.api_key}":
            self._send({"error": {"message": "wrong key"}}, 401)
        elif it.status != 200:
            self._send({"error": {"message": "the prompt is too long"}}, it.status)
        elif refused:
            self._send({"error": {"message": "return_token_ids: unknown key"}}, 400)
        elif body.get("logprobs"):
            self._send(self._with_logprobs(body))
        else:
            with it.lock:
                it.num_under_way += 1
                it.most_at_a_time = max(it.most_at_a_time, it.num_under_way)
            self._stream(body)
            with it.lock:
                it.num_under_way -= 1

    def _words(self, body: dict[str, Any]) -> list[str]:
        it = self.behaviour
        words = it.answer(body["messages"]).split(" ")[: body["max_tokens"]]
        words = [word if place == 0 else f" {word}" for place, word in enumerate(words)]
        with it.lock:
            for word in words:
                it.vocabulary.setdefault(word, len(it.vocabulary))
        return words

    def _with_logprobs(self, body: dict[str, Any]) -> dict[str, Any]:
        it, words = self.behaviour, self._words(body)
        content = []
        for place, word in enumerate(words):
            found = it.logprobs(words, place) if it.logprobs else {word: 0.0}
            top = [{"token": token, "logprob": value} for token, value in found.items()]
            content.append({"token": word, "logprob": found[word], "top_logprobs": top})
        message = {"role": "assistant", "content": "".join(words)}
        return {"choices": [{"message": message, "logprobs": {"content": content}}]}

    def _stream(self, body: dict[str, Any]) -> None:
        it, words = self.behaviour, self._words(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        pieces = [words[begin : begin + it.step] for begin in range(0, len(words), it.step)]
        space = " "  # before the first word, as many tokenizers have it
        for piece in pieces:
            content: Any = space + "".join(piece)
            if it.is_odd:
                content = [{"type": "text", "text": content}, {"type": "text", "text": None}]
            choice: dict[str, Any] = {"index": 0, "delta": {"content": content}}
            if body.get("return_token_ids"):
                choice["token_ids"] = [it.vocabulary[word] for word in piece]
            self._event({"choices": [choice]})
            space = ""
        for index, (name, arguments) in enumerate(it.tool_calls):
            middle = len(arguments) // 2
            for part in ({"name": name}, *({"arguments": arguments[s]} for s in _halves(middle))):
                call = {"index": None if it.is_odd else index, "function": part}
                self._event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
        if it.error:
            self._event(it.error)
        if it.breaks_off or it.error:
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        accepted = len(words) - len(pieces)
        with it.lock:
            it.num_accepted += accepted
            it.num_drafts += len(pieces)
        end: dict[str, Any] = {"choices": []}
        details = {"cached_tokens": it.cached_tokens}
        prompt = sum(len(str(message["content"]).split()) for message in body["messages"])
        usage = {"prompt_tokens": prompt, "completion_tokens": len(words)}
        end["usage"] = usage | {"prompt_tokens_details": details}
        if it.is_odd:
            del end["usage"]["prompt_tokens"]
        if it.metrics:
            spec = {"num_spec_steps": len(pieces)}
            spec["num_accepted_draft_tokens"] = accepted + it.past_the_end
            spec["num_draft_tokens"] = len(pieces) * (it.step - 1)
            end["metrics"] = {"speculative_decoding": spec}
        if it.own_lengths:
            end["metrics"]["token_recycling"] = {"accept_lengths": it.own_lengths}
        self._event(end)
        self.wfile.write(b"data:[DONE]\n\n" if it.is_odd else b"data: [DONE]\n\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        if not self.behaviour.is_odd:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()
            return
        data = f"data:{json.dumps(chunk, ensure_ascii=False)}\r\n\r\n".encode()
        for begin in range(0, len(data), 7):  # characters are cut, too
            self.wfile.write(data[begin : begin + 7])
            self.wfile.flush()

    def _send(self, content: Any, status: int = 200) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _halves(middle: int) -> Iterator[slice]:
    yield from (slice(0, middle), slice(middle, None))


@contextmanager
def fake_server(**behaviour: Any) -> Iterator[tuple[str, Behaviour]]:
    """Run a server in a thread of this process; yield its address, and what it does."""
    it = Behaviour(**behaviour)
    handler = type("Handler", (_Handler,), {"behaviour": it})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", it
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
