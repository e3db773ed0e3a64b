"""Answers to requests in OpenAI's JSON, whole or as a stream of events; an answer has one choice or several."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..api.output import StreamPiece, TokenLogprob
from ..api.texts import BYTE, REPLACEMENT
from ..api.tools import CallReader, Tools
from .acceptance import vllm_fields
from .decoding import Job
from .protocol import CompletionRequest, Refusal, TextRequest

# What the decoding thread sends: the number of a choice, and its next piece or what ended it.
Arrived = tuple[int, StreamPiece | Exception]


class Reply:
    """The answer to one request, seen from the event loop; of `/v1/completions`.

    Its jobs are texts in the decoding thread, a choice each; their figures are read when they have ended.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        asked: TextRequest,
        jobs: Sequence[Job],
        arrived: asyncio.Queue[Arrived],
        name: str,
        seconds: float,
        tools: Tools | None = None,
    ) -> None:
        self._asked, self._jobs, self._arrived, self._seconds = asked, jobs, arrived, seconds
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "model": name}
        self._created = int(time.time())
        self._begun: set[int] = set()  # choices of which something was told
        self._readers = [CallReader(tools.style) for _ in jobs] if tools else []
        # Of each choice's tokens whose log-probabilities were told.
        self._num_letters = [0] * len(jobs)

    def watch(self, leaving: asyncio.Task[None]) -> None:
        """Give the answer up when the client has left."""
        leaving.add_done_callback(lambda _: self.give_up())

    def give_up(self) -> None:
        for job in self._jobs:
            job.is_cancelled = True

    async def pieces(self) -> AsyncGenerator[tuple[int, StreamPiece], None]:
        """Yield the pieces of all choices, each with its number; closing the iteration gives the answer up.

        Raises:
            Refusal: if one fails, or takes too long.
        """
        try:
            num_left = len(self._jobs)
            while num_left:
                index, item = await self._arrived.get()
                if isinstance(item, TimeoutError):
                    said = f"the request took longer than {self._seconds:g} s"
                    raise Refusal(said, 504, "timeout")
                if isinstance(item, Exception):
                    raise Refusal(f"the request failed: {type(item).__name__}", 500) from item
                num_left -= item.finish_reason is not None
                yield index, item
        finally:
            self.give_up()

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer; raises Refusal as `pieces`."""
        arrived: list[list[StreamPiece]] = [[] for _ in self._jobs]
        async with aclosing(self.pieces()) as arriving:
            async for index, piece in arriving:
                arrived[index].append(piece)
        choices = []
        for index, pieces in enumerate(arrived):
            one = replace(
                pieces[-1],
                text="".join(piece.text for piece in pieces),
                token_ids=[token for piece in pieces for token in piece.token_ids],
                logprobs=[item for piece in pieces for item in piece.logprobs or ()],
            )
            choices.append(self._choice(index, one, self._message(index, one)))
        return {
            **self._of(self.whole_object, *choices),
            "usage": self._usage(),
            "metrics": self._metrics(),
        }

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the answer as server-sent events; an error is one of them."""
        options = self._asked.stream_options
        try:
            async with aclosing(self.pieces()) as pieces:
                async for index, piece in pieces:
                    is_silent = not (piece.text or piece.finish_reason or piece.logprobs)
                    if is_silent and not self._asked.return_token_ids:
                        continue
                    choice = self._choice(index, piece, self._delta(index, piece))
                    chunk = self._of(self.chunk_object, choice)
                    self._begun.add(index)
                    if options.continuous_usage_stats:
                        chunk["usage"] = self._usage()
                    yield _event(chunk)
            if options.include_usage:
                last = {**self._of(self.chunk_object), "usage": self._usage()}
                yield _event({**last, "metrics": self._metrics()})
        except Refusal as refusal:
            yield _event(refusal.body())
        yield "data: [DONE]\n\n"

    def _of(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = {**self._head, "object": kind, "created": self._created}
        return {**reply, "choices": list(choices)}

    def _choice(self, index: int, piece: StreamPiece, content: dict[str, Any]) -> dict[str, Any]:
        job, is_first = self._jobs[index], index not in self._begun
        logprobs = None
        if job.text.logprobs is not None:
            of_prompt = job.prompt_logprobs if is_first else []
            logprobs = self._logprobs(index, [*of_prompt, *(piece.logprobs or [])])
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason and self._why(index, piece.finish_reason),
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(job.text.request.prompt_ids)
        return choice

    def _usage(self) -> dict[str, Any]:
        # Choices of one prompt count it once.
        num_prompt = sum(len(job.text.request.prompt_ids) for job in self._jobs[:: self._asked.n])
        num_new = sum(job.num_new for job in self._jobs)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_new}
        cached = {"cached_tokens": sum(job.num_cached for job in self._jobs)}
        total = num_prompt + num_new
        return {**usage, "total_tokens": total, "prompt_tokens_details": cached}

    def _metrics(self) -> dict[str, Any]:
        """Return vLLM's fields, and every step under a name of our own; times of an answer with one choice."""
        steps = [step for job in self._jobs for step in job.steps]
        lengths = [step.tokens for step in steps]
        own = {
            "num_steps": len(lengths),
            "tokens_per_step": sum(lengths) / len(lengths),
            "accept_lengths": lengths,
        }
        times = self._jobs[0].times() if len(self._jobs) == 1 else {}
        return {**times, "token_recycling": own, "speculative_decoding": vllm_fields(steps)}

    def _token(self, token_id: int) -> str:
        text: str = self._jobs[0].text.tokenizer.decode([token_id])
        return text

    def _why(self, index: int, finish_reason: str) -> str:
        return finish_reason

    def _message(self, index: int, piece: StreamPiece) -> dict[str, Any]:
        return {"text": self._jobs[index].echo + piece.text}

    def _delta(self, index: int, piece: StreamPiece) -> dict[str, Any]:
        return {"text": ("" if index in self._begun else self._jobs[index].echo) + piece.text}

    def _logprobs(self, index: int, items: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets, tokens = [], [self._token(item.token_id) for item in items]
        for token in tokens:
            offsets.append(self._num_letters[index])
            self._num_letters[index] += len(token)
        top = [
            {self._token(token): value for token, value in item.top} if item.top else None
            for item in items
        ]
        values = [None if math.isnan(item.logprob) else item.logprob for item in items]
        found = {"tokens": tokens, "text_offset": offsets, "top_logprobs": top}
        return {**found, "token_logprobs": values}


class ChatReply(Reply):
    """The answer to `/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _of(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        # The prompt's tokens stand beside the choices, as vLLM has it.
        prompts = [choice.pop("prompt_token_ids", None) for choice in choices]
        found = super()._of(kind, *choices)
        return found | ({"prompt_token_ids": prompts[0]} if any(prompts) else {})

    def _message(self, index: int, piece: StreamPiece) -> dict[str, Any]:
        said = self._said(index, piece)
        for call in said.get("tool_calls", ()):
            del call["index"]  # of streams alone
        return {"message": {"role": "assistant", **said}}

    def _delta(self, index: int, piece: StreamPiece) -> dict[str, Any]:
        role = {} if index in self._begun else {"role": "assistant"}
        return {"delta": {**role, **self._said(index, piece)}}

    def _said(self, index: int, piece: StreamPiece) -> dict[str, Any]:
        """Return the text and the calls of a piece."""
        if not self._readers:
            return {"content": piece.text}
        reader, is_last = self._readers[index], piece.finish_reason is not None
        text, calls = reader.take(piece.text, is_last)
        return {"content": text or None, "tool_calls": calls} if calls else {"content": text}

    def _why(self, index: int, finish_reason: str) -> str:
        has_called = self._readers and self._readers[index].num_calls
        return "tool_calls" if has_called and finish_reason == "stop" else finish_reason

    def _logprobs(self, index: int, items: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = []
        for item in items:
            top = [self._named(*pair) for pair in item.top]
            content.append({**self._named(item.token_id, item.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, tokenizer = self._token(token_id), self._jobs[0].text.tokenizer
        return {
            "token": text,
            "logprob": logprob,
            "bytes": list(token_bytes(tokenizer, token_id, text)),
        }


def reply_to(asked: TextRequest) -> type[Reply]:
    return Reply if isinstance(asked, CompletionRequest) else ChatReply


def token_bytes(tokenizer: Any, token_id: int, text: str) -> bytes:
    """Return the bytes of a token, of whose characters some may be incomplete in its text."""
    if REPLACEMENT not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token_id) or ""
    if BYTE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    letters = _letters()
    known = all(letter in letters for letter in piece)
    return bytes(letters[letter] for letter in piece) if known else text.encode()


@cache
def _letters() -> dict[str, int]:
    """Return the byte of each letter in which tokenizers of bytes write one."""
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
