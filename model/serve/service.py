"""What becomes of a checked request: texts for the decoding thread, whose pieces come back as OpenAI's JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from queue import Full
from typing import Any

from ..api.decoder import SpeculativeDecoder
from ..api.output import StreamPiece
from ..api.prompts import chat_ids, prompt_ids_of
from ..api.text_options import TextOptions, Texts
from ..api.texts import Text
from ..api.tools import Tools
from .decoding import DecodingThread, Job
from .options import ServeOptions
from .protocol import ChatFields, CompletionRequest, Refusal, TextRequest, TokenizeRequest
from .reply import Arrived, Reply, reply_to

# Fields that `TextOptions` has under the same names.
SAME = ["top_p", "min_p", "seed", "ignore_eos", "stop_token_ids"]
SAME += ["repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"]
# A system prompt to look for in a prompt.
MARK = "q8Zsystem"
# Bytes of a request up to which its text becomes tokens at once; larger ones wait for each other.
SMALL = 2**14
NUM_READERS = 2
# New tokens of a text where neither the request nor the server nor the model has a limit.
UNLIMITED = 1024


class Service:
    """Answers requests for one model by its name; `thread`, which decodes, is to be started."""

    def __init__(self, decoder: SpeculativeDecoder, options: ServeOptions, name: str) -> None:
        self.options, self._decoder, self._name = options, decoder, name
        self._begun = int(time.time())
        self._keeps_system = _keeps_system(decoder.tokenizer)
        self._readers = ThreadPoolExecutor(NUM_READERS)
        decoder.queue.prefix_cache.most_bytes = options.cache_mib * 2**20
        self.thread = DecodingThread(decoder, name, options.batch_size, options.max_queue)

    def models(self) -> dict[str, Any]:
        """Return the list of models: one."""
        return {"object": "list", "data": [self.model(self._name)]}

    def model(self, name: str) -> dict[str, Any]:
        """Return the model; raises Refusal for another name."""
        self._check_name(name)
        found = {"id": self._name, "object": "model", "created": self._begun}
        return {**found, "owned_by": "token-recycling", "max_model_len": self._context}

    @property
    def _context(self) -> int | None:
        return self._decoder.target.context_limit()

    def _check_name(self, name: str) -> None:
        if name != self._name:
            said = f"model: got {name[:100]!r}; allowed: {self._name}"
            raise Refusal(said, 404, "model_not_found")

    async def tokens(self, asked: TokenizeRequest, num_bytes: int) -> dict[str, Any]:
        """Return the tokens of a text or of messages, in the fields of vLLM."""
        self._check_name(asked.model)
        try:
            (ids,) = await self._in_reader(partial(self._prompts, asked), num_bytes)
        except ValueError as error:
            raise Refusal(str(error)) from error
        return {"count": len(ids), "max_model_len": self._context, "tokens": ids}

    async def begin(self, asked: TextRequest, deadline: float, num_bytes: int) -> Reply:
        """Queue a request of so many bytes with its latest end, by `time.monotonic`.

        Raises Refusal if it cannot be answered.
        """
        self._check_name(asked.model)
        texts = await self._in_reader(partial(self._texts, asked), num_bytes)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Arrived] = asyncio.Queue()

        def send(index: int, item: StreamPiece | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, (index, item))

        echoes = self._echoes(asked, texts)
        num_top = asked.num_top_logprobs if any(echoes) else None
        jobs = [
            Job(text, partial(send, index), deadline, echo, num_top)
            for index, (text, echo) in enumerate(zip(texts, echoes, strict=True))
        ]
        try:
            self.thread.submit(jobs)
        except Full:
            raise Refusal("the queue is full; try again later", 503, "queue_full") from None
        except RuntimeError as error:
            raise Refusal(str(error), 503) from error
        seconds, tools = self.options.request_seconds, self.tools_of(asked)
        return reply_to(asked)(asked, jobs, arrived, self._name, seconds, tools)

    async def _in_reader(self, make: Any, num_bytes: int) -> Any:
        """Return what is made of a request's text; streams go on meanwhile, and a cancelled one is not begun."""
        readers = self._readers if num_bytes > SMALL else None
        return await asyncio.get_running_loop().run_in_executor(readers, make)

    def _texts(self, asked: TextRequest) -> list[Text]:
        """Return the texts of a request, `n` for each of its prompts."""
        try:
            own = {name: getattr(asked, name) for name in SAME}
            given = self.options.temperature if asked.temperature is None else asked.temperature
            target, found = self._decoder.target, []
            for prompt_ids in self._prompts(asked):
                options = TextOptions(
                    max_new_tokens=self._limit(asked, len(prompt_ids)),
                    temperature=given,
                    top_k=max(asked.top_k, 0),
                    min_new_tokens=asked.min_tokens,
                    logprobs=asked.num_top_logprobs,
                    grammar=self._grammar(asked),
                    prediction=asked.prediction.text if asked.prediction else None,
                    **own,
                )
                texts = Texts(target, self._decoder.tokenizer, options)
                for index in range(asked.n):
                    text = texts.text(prompt_ids, index=index)
                    request = text.request.checked(target)
                    found.append(replace(text, request=request, stop=asked.stop_strings))
            return found
        except ValueError as error:
            raise Refusal(str(error)) from error

    def tools_of(self, asked: TextRequest | ChatFields) -> Tools | None:
        """Return the tools that an answer may call; None if there are none."""
        functions = asked.functions if isinstance(asked, ChatFields) else []
        return Tools(functions, self._decoder.tokenizer) if functions else None

    def _grammar(self, asked: TextRequest) -> dict[str, Any] | str | None:
        """Return the grammar of an answer: that of its format, or of a call that it must be."""
        grammar = asked.response_format.grammar
        choice = asked.tool_choice if isinstance(asked, ChatFields) else "auto"
        if choice in ("none", "auto"):
            return grammar
        if grammar is not None or (tools := self.tools_of(asked)) is None:
            raise ValueError(
                "tool_choice: asks for a call; allowed: with tools, and without response_format"
            )
        return tools.grammar(None if isinstance(choice, str) else choice.function.name)

    def _limit(self, asked: TextRequest, num_prompt: int) -> int:
        """Return the most new tokens of a text."""
        context = self._context
        most = self.options.max_new_tokens or context or UNLIMITED
        room = most if context is None else max(1, context - num_prompt)
        limit = asked.limit or min(room, most)
        if limit > most:
            raise Refusal(f"max_tokens: got {limit}; allowed: at most {most} of this server")
        return limit

    def _prompts(self, asked: TextRequest | TokenizeRequest) -> list[list[int]]:
        """Return the tokens of each prompt; a text of more bytes than the context can hold is not read."""
        most, found = self.options.max_prompt_tokens or self._context, []
        for prompt in asked.prompts:
            texts = [prompt] if isinstance(prompt, str) else []
            if isinstance(asked, ChatFields):
                texts = [message.model_dump_json() for message in (*asked.messages, *asked.tools)]
            num_bytes = sum(len(text.encode()) for text in texts)
            if most is not None and num_bytes > most * self._longest_token:
                raise ValueError(f"prompt: got {num_bytes} bytes; allowed: at most {most} tokens")
            if isinstance(asked, ChatFields):
                ids = self._chat_ids(asked)
            else:
                ids = prompt_ids_of(prompt, self._decoder.tokenizer)  # type: ignore[arg-type]
            if most is not None and len(ids) > most:
                raise ValueError(f"prompt: got {len(ids)} tokens; allowed: at most {most}")
            found.append(ids)
        return found

    @cached_property
    def _longest_token(self) -> int:
        """The most bytes that a token of the vocabulary stands for, or more."""
        return max(len(token.encode()) for token in self._decoder.tokenizer.get_vocab())

    def _chat_ids(self, asked: ChatFields) -> list[int]:
        said = [one.for_template() for one in asked.messages]
        if not self._keeps_system and any(one["role"] == "system" for one in said):
            raise ValueError(
                "messages: got a system message, which the model's chat template does not take; leave it out"
            )
        variables = dict(asked.chat_template_kwargs)
        if asked.reasoning_effort is not None:
            variables["reasoning_effort"] = asked.reasoning_effort
        # As OpenAI's, an answer begins anew after the assistant's message too.
        functions, tokenizer = asked.functions, self._decoder.tokenizer
        return chat_ids(said, tokenizer, functions, variables, continue_final_message=False)

    def _echoes(self, asked: TextRequest, texts: Sequence[Text]) -> list[str]:
        """Return what each choice tells of its prompt."""
        if not (isinstance(asked, CompletionRequest) and asked.echo):
            return [""] * len(texts)
        return [
            prompt if isinstance(prompt, str) else self._decoder.tokenizer.decode(prompt)
            for prompt in asked.prompts
            for _ in range(asked.n)
        ]


def _keeps_system(tokenizer: Any) -> bool:
    """Whether the chat template writes system messages; false without a template."""
    messages = [{"role": "system", "content": MARK}, {"role": "user", "content": "Hello"}]
    try:
        return MARK in tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # Jinja's, or whatever a template raises
        return False
