"""Answers in OpenAI's JSON: whole, or as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from .jobs import Job, Piece, TokenLogprob
from .protocol import TextFields


class Reply:
    """The answer to one request.

    Args:
        asked: the request.
        job: its text, whose figures are read when it has ended.
        name: the model's.
    """

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, asked: TextFields, job: Job, name: str) -> None:
        self._asked, self._job = asked, job
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "model": name}
        self._created = int(time.time())
        self._is_begun = False
        self._num_letters = 0  # of the tokens whose log-probabilities were told

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the whole answer."""
        one = Piece(
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.token_ids],
            pieces[-1].finish_reason,
            [item for piece in pieces for item in piece.logprobs],
        )
        reply = self._of(self.whole_object, self._choice(one, self._message(one.text)))
        return {**reply, "usage": self._usage(), "metrics": self._metrics()}

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """Return a piece of a stream; None if there is nothing to tell."""
        is_silent = not (piece.text or piece.finish_reason or piece.logprobs)
        if is_silent and not self._asked.return_token_ids:
            return None
        chunk = self._of(self.chunk_object, self._choice(piece, self._delta(piece.text)))
        self._is_begun = True
        if self._asked.stream_options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        return chunk

    def usage_chunk(self) -> dict[str, Any] | None:
        """Return the last piece of a stream, without a choice; None if it was not asked for."""
        if not self._asked.stream_options.include_usage:
            return None
        chunk = {**self._of(self.chunk_object), "usage": self._usage()}
        return {**chunk, "metrics": self._metrics()}

    def _of(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = {**self._head, "object": kind, "created": self._created}
        return {**reply, "choices": list(choices)}

    def _choice(self, piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs(piece.logprobs) if self._job.logprobs else None
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        if self._asked.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
            if not self._is_begun:
                choice["prompt_token_ids"] = list(self._job.request.prompt_ids)
        return choice

    def _usage(self) -> dict[str, int]:
        num_prompt, num_new = len(self._job.request.prompt_ids), self._job.num_new
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_new}
        return {**usage, "total_tokens": num_prompt + num_new}

    def _metrics(self) -> dict[str, Any]:
        """Return vLLM's fields, and every step under a name of our own."""
        acceptance = self._job.acceptance
        lengths = acceptance.accept_lengths
        own = {
            "num_steps": len(lengths),
            "tokens_per_step": sum(lengths) / len(lengths),
            "accept_lengths": lengths,
        }
        found: dict[str, Any] = {**self._job.times(), "token_recycling": own}
        return {**found, "speculative_decoding": acceptance.vllm_fields()}

    def _token(self, token_id: int) -> str:
        text: str = self._job.tokenizer.decode([token_id])
        return text

    def _message(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, items: Sequence[TokenLogprob]) -> dict[str, Any]:
        raise NotImplementedError


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


class CompletionReply(Reply):
    """The answer to `/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

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
