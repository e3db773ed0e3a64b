"""A request that is decoded: its text piece by piece, cut at a stop string, and its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..api.output import TextStream
from ..engine.request import Request
from ..engine.step import StepRecord
from .acceptance import Acceptance, StepCounts

# OpenAI's words for why a text ended.
FINISH_REASONS = {"eos": "stop", "criteria": "stop", "length": "length", "context": "length"}


class TokenLogprob(NamedTuple):
    """The model's log-probability of a token, and of the likeliest ones at its place."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Logprobs:
    """A logits processor that changes nothing, and notes the log-probabilities at each place.

    Args:
        num_prompt: tokens of the prompt.
        num_top: how many of the likeliest tokens are told.
    """

    def __init__(self, num_prompt: int, num_top: int) -> None:
        self._length, self._num_top = num_prompt, num_top
        self._rows: dict[int, torch.Tensor] = {}  # by the length of the text before

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note the scores [1, V] after these tokens [1, P]; at a near-tie the second ones count."""
        self._rows[token_ids.shape[1]] = scores[0].float().log_softmax(dim=-1)
        return scores

    def take(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """Return those of the next tokens, and forget them."""
        found = []
        for place, token in enumerate(tokens, self._length):
            row = self._rows[place]
            values, ids = row.topk(min(self._num_top, len(row)))
            top = list(zip(ids.tolist(), values.tolist(), strict=True))
            found.append(TokenLogprob(token, float(row[token]), top))
        self._length += len(tokens)
        self._rows.clear()
        return found


class Piece(NamedTuple):
    """What a step adds to an answer.

    Attributes:
        text: whole characters, none of which could belong to a stop string.
        token_ids: the step's tokens, up to the one that completes a stop string.
        finish_reason: OpenAI's word for why the text ended; None if it goes on.
        logprobs: of the tokens, if they were asked for.
    """

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    logprobs: list[TokenLogprob]


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way through the decoding thread.

    Attributes:
        request: the text that is asked for.
        send: takes pieces, or one error, in the decoding thread.
        tokenizer: makes text of tokens.
        stop: strings before which the text ends.
        logprobs: notes log-probabilities; also a processor of the request's rule.
        deadline: `time.monotonic` of the latest end.
        is_cancelled: set from any thread; the text leaves before the next step.
        acceptance: the steps so far.
        asked, begun, first, last: `time.monotonic` of its arrival, its admission, its first and last piece.
    """

    request: Request
    send: Callable[[Piece | Exception], None]
    tokenizer: Any
    stop: Sequence[str] = ()
    logprobs: Logprobs | None = None
    deadline: float = float("inf")
    is_cancelled: bool = False
    acceptance: Acceptance = field(default_factory=Acceptance)
    asked: float = field(default_factory=time.monotonic)
    begun: float = 0.0
    first: float = 0.0
    last: float = 0.0
    _stream: TextStream = field(init=False)
    _held: str = ""

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer)

    @property
    def num_new(self) -> int:
        """New tokens so far."""
        return sum(self.acceptance.accept_lengths)

    def piece(self, record: StepRecord) -> Piece:
        """Take a step; return what it adds to the answer."""
        text, count, reason = self._text(record)
        tokens = record.tokens[:count]
        self.acceptance.steps.append(StepCounts.of(record, count))
        self.last = time.monotonic()
        self.first = self.first or self.last
        logprobs = self.logprobs.take(tokens) if self.logprobs else []
        return Piece(text, tokens, reason, logprobs)

    def _text(self, record: StepRecord) -> tuple[str, int, str | None]:
        """Return the text that a step adds, the number of its tokens that count, and why the text ends."""
        tokens, ended = record.tokens, record.stop_reason is not None
        reason = FINISH_REASONS[record.stop_reason] if record.stop_reason else None
        if not self.stop:
            return self._stream.add(tokens, is_last=ended), len(tokens), reason
        shown = ""
        for count, token in enumerate(tokens, 1):
            is_last = ended and count == len(tokens)
            self._held += self._stream.add([token], is_last)
            if found := [place for one in self.stop if (place := self._held.find(one)) >= 0]:
                return shown + self._held[: min(found)], count, "stop"
            num_open = 0 if is_last else self._num_open()
            settled = len(self._held) - num_open
            shown, self._held = shown + self._held[:settled], self._held[settled:]
        return shown, len(tokens), reason

    def _num_open(self) -> int:
        """Return the number of characters at the end that may be the beginning of a stop string."""
        longest = max(map(len, self.stop)) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(one.startswith(self._held[-count:]) for one in self.stop):
                return count
        return 0

    def times(self) -> dict[str, float | None]:
        """Return the times of the answer in the fields of vLLM's responses."""
        decoding = self.last - self.first
        rest = self.num_new - 1  # tokens after the first one
        return {
            "queue_time_ms": 1e3 * (self.begun - self.asked),
            "time_to_first_token_ms": 1e3 * (self.first - self.asked),
            "generation_time_ms": 1e3 * decoding,
            "mean_itl_ms": 1e3 * decoding / rest if rest else None,
            "tokens_per_second": rest / decoding if rest and decoding else None,
        }
