"""What becomes of a checked request: a text for the decoding thread, whose pieces come back as OpenAI's JSON."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from queue import Full
from typing import Any

from ..api.decoder import SpeculativeDecoder
from ..api.output import StreamPiece, TokenLogprob
from ..api.prompts import chat_ids, prompt_ids_of
from ..api.text_options import TextOptions, Texts
from ..api.texts import Text
from .acceptance import vllm_fields
from .decoding import DecodingThread, Job
from .options import ServeOptions
from .protocol import ChatRequest, CompletionRequest, Refusal, TextRequest

# Fields that `TextOptions` has under the same names.
SAME = ["top_p", "min_p", "seed", "ignore_eos", "stop_token_ids"]
SAME += ["repetition_penalty", "presence_penalty", "frequency_penalty"]
# A system prompt to look for in a prompt.
MARK = "q8Zsystem"


class Reply:
    """The answer to one request, seen from the event loop: whole, or as chunks of a stream; of `/v1/completions`.

    The job is its text in the decoding thread, which sends what arrives; its figures are read when it has ended.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        asked: TextRequest,
        job: Job,
        arrived: asyncio.Queue[StreamPiece | Exception],
        name: str,
        seconds: float,
    ) -> None:
        self._asked, self._job, self._arrived, self._seconds = asked, job, arrived, seconds
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "model": name}
        self._created = int(time.time())
        self._is_begun = False
        self._num_letters = 0  # of the tokens whose log-probabilities were told

    def watch(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
        """Give the answer up when the client closes the connection, of which `receive` tells."""

        async def watching() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._job.is_cancelled = True

        self._watcher = asyncio.create_task(watching())  # else nobody holds it

    async def pieces(self) -> AsyncGenerator[StreamPiece, None]:
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
            self._job.is_cancelled = True

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer; raises Refusal as `pieces`."""
        async with aclosing(self.pieces()) as arriving:
            pieces = [piece async for piece in arriving]
        one = replace(
            pieces[-1],
            text="".join(piece.text for piece in pieces),
            token_ids=[token for piece in pieces for token in piece.token_ids],
            logprobs=[item for piece in pieces for item in piece.logprobs or ()],
        )
        reply = self._of(self.whole_object, self._choice(one, self._message(one.text)))
        return {**reply, "usage": self._usage(), "metrics": self._metrics()}

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the answer as server-sent events; an error is one of them."""
        options = self._asked.stream_options
        try:
            async with aclosing(self.pieces()) as pieces:
                async for piece in pieces:
                    is_silent = not (piece.text or piece.finish_reason or piece.logprobs)
                    if is_silent and not self._asked.return_token_ids:
                        continue
                    choice = self._choice(piece, self._delta(piece.text))
                    chunk = self._of(self.chunk_object, choice)
                    self._is_begun = True
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

    def _choice(self, piece: StreamPiece, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs(piece.logprobs or []) if self._job.text.logprobs else None
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        if self._asked.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
            if not self._is_begun:
                choice["prompt_token_ids"] = list(self._job.text.request.prompt_ids)
        return choice

    def _usage(self) -> dict[str, int]:
        num_prompt, num_new = len(self._job.text.request.prompt_ids), self._job.num_new
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_new}
        return {**usage, "total_tokens": num_prompt + num_new}

    def _metrics(self) -> dict[str, Any]:
        """Return vLLM's fields, and every step under a name of our own."""
        lengths = [step.tokens for step in self._job.steps]
        own = {
            "num_steps": len(lengths),
            "tokens_per_step": sum(lengths) / len(lengths),
            "accept_lengths": lengths,
        }
        found: dict[str, Any] = {**self._job.times(), "token_recycling": own}
        return {**found, "speculative_decoding": vllm_fields(self._job.steps)}

    def _token(self, token_id: int) -> str:
        text: str = self._job.text.tokenizer.decode([token_id])
        return text

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, items: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets, tokens = [], [self._token(item.token_id) for item in items]
        for token in tokens:
            offsets.append(self._num_letters)
            self._num_letters += len(token)
        top = [{self._token(token): value for token, value in item.top} for item in items]
        found: dict[str, Any] = {"tokens": tokens, "text_offset": offsets, "top_logprobs": top}
        return {**found, "token_logprobs": [item.logprob for item in items]}


class ChatReply(Reply):
    """The answer to `/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> dict[str, Any]:
        role = {} if self._is_begun else {"role": "assistant"}
        return {"delta": {**role, "content": text}}

    def _logprobs(self, items: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = []
        for item in items:
            top = [self._named(*pair) for pair in item.top]
            content.append({**self._named(item.token_id, item.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class Service:
    """Answers requests for one model by its name; `thread`, which decodes, is to be started."""

    def __init__(self, decoder: SpeculativeDecoder, options: ServeOptions, name: str) -> None:
        self.options, self._decoder, self._name = options, decoder, name
        self._begun = int(time.time())
        self._keeps_system = _keeps_system(decoder.tokenizer)
        self.thread = DecodingThread(decoder, name, options.batch_size, options.max_queue)

    def models(self) -> dict[str, Any]:
        """Return the list of models: one."""
        model: dict[str, Any] = {"id": self._name, "object": "model", "created": self._begun}
        length = self._decoder.target.context_limit()
        model |= {"owned_by": "token-recycling", "max_model_len": length}
        return {"object": "list", "data": [model]}

    async def begin(self, asked: TextRequest, deadline: float) -> Reply:
        """Queue a request with its latest end, by `time.monotonic`; raises Refusal if it cannot be answered."""
        if asked.model != self._name:
            said = f"model: got {asked.model!r}; allowed: {self._name}"
            raise Refusal(said, 404, "model_not_found")
        # A long prompt takes its time; streams go on meanwhile.
        text = await asyncio.to_thread(self._text, asked)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[StreamPiece | Exception] = asyncio.Queue()

        def send(item: StreamPiece | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        job = Job(text, send, deadline)
        kind = ChatReply if isinstance(asked, ChatRequest) else Reply
        try:
            self.thread.submit(job)
        except Full:
            raise Refusal("the queue is full; try again later", 503, "queue_full") from None
        except RuntimeError as error:
            raise Refusal(str(error), 503) from error
        return kind(asked, job, arrived, self._name, self.options.request_seconds)

    def _text(self, asked: TextRequest) -> Text:
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
            own = {name: getattr(asked, name) for name in SAME}
            given = limits.temperature if asked.temperature is None else asked.temperature
            options = TextOptions(
                max_new_tokens=limit,
                temperature=given,
                top_k=max(asked.top_k, 0),
                min_new_tokens=asked.min_tokens,
                logprobs=asked.num_top_logprobs,
                **own,
            )
            target = self._decoder.target
            text = Texts(target, self._decoder.tokenizer, options).text(prompt_ids)
            return replace(text, request=text.request.checked(target), stop=asked.stop_strings)
        except ValueError as error:
            raise Refusal(str(error)) from error

    def _prompt_ids(self, asked: TextRequest) -> list[int]:
        if isinstance(asked, CompletionRequest):
            return prompt_ids_of(asked.one_prompt, self._decoder.tokenizer)
        messages = [message.model_dump() for message in asked.messages]
        if not self._keeps_system and any(one["role"] == "system" for one in messages):
            raise ValueError(
                "messages: got a system message, which the model's chat template does not take; leave it out"
            )
        # As OpenAI's, an answer begins anew after the assistant's message too.
        kwargs = asked.chat_template_kwargs
        return chat_ids(messages, self._decoder.tokenizer, (), kwargs, continue_final_message=False)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _keeps_system(tokenizer: Any) -> bool:
    """Whether the chat template writes system messages; false without a template."""
    messages = [{"role": "system", "content": MARK}, {"role": "user", "content": "Hello"}]
    try:
        return MARK in tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # Jinja's, or whatever a template raises
        return False
