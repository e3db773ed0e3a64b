"""What becomes of a checked request: a text for the decoding thread, whose pieces come back to the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ..api.decoder import SpeculativeDecoder
from ..api.prompts import prompt_ids_of
from ..engine.request import Request
from ..engine.rules import token_rule
from .decoding import DecodingThread, QueueFullError
from .jobs import Job, Logprobs, Piece
from .options import ServeOptions
from .protocol import ChatRequest, CompletionRequest, Refusal, TextFields
from .replies import ChatReply, CompletionReply, Reply

# A system prompt to look for in a prompt.
MARK = "q8Zsystem"


class Answering:
    """A request that is decoded, seen from the event loop.

    Args:
        job: the request in the decoding thread.
        arrived: what the thread sends.
        reply: makes the answer's JSON.
        seconds: longest time of a request.
    """

    def __init__(
        self, job: Job, arrived: asyncio.Queue[Piece | Exception], reply: Reply, seconds: float
    ) -> None:
        self._job, self._arrived, self._reply, self._seconds = job, arrived, reply, seconds

    def cancel(self) -> None:
        """Give the answer up: its text leaves before the next step."""
        self._job.is_cancelled = True

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the answer; closing the iteration gives it up.

        Raises:
            Refusal: if it fails, or takes too long.
        """
        try:
            reason = None
            while reason is None:
                item = await self._arrived.get()
                if isinstance(item, TimeoutError):
                    said = f"the request took longer than {self._seconds:g} s"
                    raise Refusal(said, 504, "timeout")
                if isinstance(item, Exception):
                    raise Refusal(f"the request failed: {type(item).__name__}", 500) from item
                reason = item.finish_reason
                yield item
        finally:
            self.cancel()

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer; raises Refusal as `pieces`."""
        async with aclosing(self.pieces()) as pieces:
            return self._reply.whole([piece async for piece in pieces])

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the answer as server-sent events; an error is one of them."""
        try:
            async with aclosing(self.pieces()) as pieces:
                async for piece in pieces:
                    if (chunk := self._reply.chunk(piece)) is not None:
                        yield _event(chunk)
            if (last := self._reply.usage_chunk()) is not None:
                yield _event(last)
        except Refusal as refusal:
            yield _event(refusal.body())
        yield "data: [DONE]\n\n"


class Service:
    """Answers requests for one model.

    Args:
        decoder: the model with its method and tokenizer.
        options: limits.
        name: the model's in requests.

    Attributes:
        thread: decodes; to be started.
    """

    def __init__(self, decoder: SpeculativeDecoder, options: ServeOptions, name: str) -> None:
        self.options, self._decoder, self._name = options, decoder, name
        self._begun = int(time.time())
        self._eos_ids = decoder.eos_ids
        self._keeps_system = _keeps_system(decoder.tokenizer)
        self.thread = DecodingThread(decoder, name, options.batch_size, options.max_queue)

    def models(self) -> dict[str, Any]:
        """Return the list of models: one."""
        model: dict[str, Any] = {"id": self._name, "object": "model", "created": self._begun}
        length = self._decoder.target.context_limit(1)
        model |= {"owned_by": "token-recycling", "max_model_len": length}
        return {"object": "list", "data": [model]}

    async def begin(self, asked: TextFields, deadline: float) -> Answering:
        """Put a request into the queue.

        Args:
            asked: the request.
            deadline: `time.monotonic` of its latest end.

        Raises:
            Refusal: if it cannot be answered.
        """
        if asked.model != self._name:
            said = f"model: got {asked.model!r}; allowed: {self._name}"
            raise Refusal(said, 404, "model_not_found")
        # A long prompt takes its time; streams go on meanwhile.
        request, logprobs = await asyncio.to_thread(self._text_request, asked)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()

        def send(item: Piece | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        tokenizer, stop = self._decoder.tokenizer, asked.stop_strings
        job = Job(request, send, tokenizer, stop, logprobs, deadline)
        kind = ChatReply if isinstance(asked, ChatRequest) else CompletionReply
        try:
            self.thread.submit(job)
        except QueueFullError:
            raise Refusal("the queue is full; try again later", 503, "queue_full") from None
        except RuntimeError as error:
            raise Refusal(str(error), 503) from error
        return Answering(job, arrived, kind(asked, job, self._name), self.options.request_seconds)

    def _text_request(self, asked: TextFields) -> tuple[Request, Logprobs | None]:
        limits = self.options
        limit = asked.limit or limits.max_new_tokens
        if limit > limits.max_new_tokens:
            raise Refusal(
                f"max_tokens: got {limit}; allowed: at most {limits.max_new_tokens}, the server's max_new_tokens"
            )
        try:
            prompt_ids = self._prompt_ids(asked)
            most = limits.max_prompt_tokens
            if most is not None and len(prompt_ids) > most:
                raise ValueError(f"prompt: got {len(prompt_ids)} tokens; allowed: at most {most}")
            wanted = asked.num_top_logprobs
            logprobs = None if wanted is None else Logprobs(len(prompt_ids), wanted)
            rule = token_rule(
                self._decoder.target.device,
                limits.temperature if asked.temperature is None else asked.temperature,
                max(asked.top_k, 0),
                asked.top_p,
                asked.seed,
                [logprobs] if logprobs else [],
            )
            eos_ids = frozenset[int]() if asked.ignore_eos else self._eos_ids
            request = Request(prompt_ids, limit, eos_ids, rule).checked(self._decoder.target)
        except ValueError as error:
            raise Refusal(str(error)) from error
        return request, logprobs

    def _prompt_ids(self, asked: TextFields) -> list[int]:
        """Return the prompt's tokens.

        Raises:
            ValueError: if the prompt cannot be used.
        """
        if isinstance(asked, CompletionRequest):
            return prompt_ids_of(asked.one_prompt, self._decoder.tokenizer)
        assert isinstance(asked, ChatRequest)
        messages = [message.model_dump() for message in asked.messages]
        if not self._keeps_system and any(one["role"] == "system" for one in messages):
            raise ValueError(
                "messages: got a system message, which the model's chat template does not take; leave it out"
            )
        return prompt_ids_of(messages, self._decoder.tokenizer)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _keeps_system(tokenizer: Any) -> bool:
    """Whether the chat template writes system messages; false without a template."""
    messages = [{"role": "system", "content": MARK}, {"role": "user", "content": "Hello"}]
    try:
        return MARK in tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # Jinja's, or whatever a template raises
        return False
