"""Answers of a decoder, whole or in pieces, and log-probabilities of their tokens.

Shapes: P tokens of the prompt, n new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..engine.step import StepRecord

SHOWN = 60  # characters of a text in an output's repr
# Why a text ended, in OpenAI's words where it has them.
FINISH_REASONS = {
    "eos": "stop",
    "criteria": "stop",
    "length": "length",
    "context": "length",
    "time": "time",
    "cancelled": "cancelled",
}


class TokenLogprob(NamedTuple):
    """The model's log-probability of a token, before penalties and temperature, and of the likeliest ones there."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # likeliest first

    @classmethod
    def of(cls, token: int, row: torch.Tensor, num_top: int) -> TokenLogprob:
        """Return a token's of a row of log-probabilities [V]."""
        values, ids = row.topk(min(num_top, len(row)))
        return cls(token, float(row[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))


@dataclass(frozen=True, slots=True, repr=False)
class GenerateOutput:
    """A whole answer.

    Attributes:
        sequences: prompt and new tokens, int64 [1, P + n], on the model's device.
        token_ids: the n new tokens.
        text: the new tokens as text, special tokens and the stop string left out; empty without a tokenizer.
        steps: a record of every step, in order.
        prefill_time: seconds to read the prompt.
        decode_time: seconds of the steps after that, which the texts of a batch share; the time in which other
            texts had their turn is in neither.
        stop_string: the stop string that ended the text; None if none did.
        logprobs: of each new token, if they were asked for.
    """

    sequences: torch.Tensor
    token_ids: list[int]
    text: str
    steps: list[StepRecord]
    prefill_time: float
    decode_time: float
    stop_string: str | None = None
    logprobs: list[TokenLogprob] | None = None

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens emitted by each step, bonus token included; their sum is n."""
        return [len(step.tokens) for step in self.steps]

    @property
    def mean_accepted_tokens(self) -> float:
        """New tokens a step, bonus token included (MAT); plain decoding has 1."""
        return len(self.token_ids) / len(self.steps)

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of decoding, without the time to read the prompt."""
        return len(self.token_ids) / self.decode_time

    @property
    def stop_reason(self) -> str | None:
        """Why the text ended: "eos", "criteria" (a stop string), "length", "context", "time" or "cancelled"."""
        return self.steps[-1].stop_reason

    @property
    def finish_reason(self) -> str | None:
        """The same in OpenAI's words: "stop" or "length"; "time" and "cancelled" are our own."""
        return FINISH_REASONS[self.stop_reason] if self.stop_reason else None

    def to_dict(self) -> dict[str, Any]:
        """Return the answer and its figures as values that json can write."""
        names = "text finish_reason stop_reason stop_string token_ids logprobs accept_lengths"
        names += " prefill_time decode_time"
        found = {name: getattr(self, name) for name in names.split()}
        if self.logprobs is not None:
            found["logprobs"] = [one._asdict() for one in self.logprobs]
        return {**found, "prompt_tokens": self.sequences.shape[1] - len(self.token_ids)}

    def summary(self) -> str:
        """Return the figures in one line."""
        return (
            f"{len(self.token_ids)} tokens in {len(self.steps)} steps: {self.mean_accepted_tokens:.2f} tokens "
            f"a step (MAT), {self.tokens_per_second:.1f} tokens/s; prompt {self.prefill_time:.3f} s, answer "
            f"{self.decode_time:.3f} s; ended by {self.stop_reason}"
        )

    def __repr__(self) -> str:
        """Return the beginning of the text and the figures."""
        rest = "..." if len(self.text) > SHOWN else ""
        return f"GenerateOutput({self.text[:SHOWN]!r}{rest}, {self.summary()})"


@dataclass(frozen=True, slots=True, repr=False)
class StreamPiece:
    """The part of a streamed text that one step adds.

    Attributes:
        text: complete characters; may be empty, for an incomplete character or special tokens.
        token_ids: the step's tokens.
        record: the step.
        stop_string: as of `GenerateOutput`, in the last piece.
        logprobs: of the step's tokens, if they were asked for.
    """

    text: str
    token_ids: list[int]
    record: StepRecord
    stop_string: str | None = None
    logprobs: list[TokenLogprob] | None = None

    @property
    def finish_reason(self) -> str | None:
        """Why the text ended, as of `GenerateOutput`; None if it goes on."""
        if self.stop_string is not None:  # of which the record of a server's step knows nothing
            return "stop"
        return FINISH_REASONS[self.record.stop_reason] if self.record.stop_reason else None

    def __str__(self) -> str:
        """Return the text, so that a piece can be printed."""
        return self.text

    def __repr__(self) -> str:
        return f"StreamPiece({self.text!r}, token_ids={self.token_ids}, record={self.record!r})"


class Logprobs:
    """A logits processor that changes nothing, and notes the log-probabilities at each place after a prompt."""

    def __init__(self, num_prompt: int, num_top: int) -> None:
        self._length, self._num_top = num_prompt, num_top
        # Rows whose token is not known, by the length of the text before.
        self._rows: dict[int, torch.Tensor] = {}
        self._found: dict[int, TokenLogprob] = {}

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note the scores [1, V] after these tokens [1, P]; at a near-tie the second ones count."""
        length = token_ids.shape[1]
        for place in [place for place in self._rows if place < length]:
            self._note(place, int(token_ids[0, place]))
        self._rows[length] = scores[0].float().log_softmax(dim=-1)
        return scores

    def _note(self, place: int, token: int) -> None:
        self._found[place] = TokenLogprob.of(token, self._rows.pop(place), self._num_top)

    def take(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """Return those of the next tokens, and forget them."""
        places = range(self._length, self._length + len(tokens))
        for place, token in zip(places, tokens, strict=True):
            if place in self._rows:
                self._note(place, token)
        self._length += len(tokens)
        return [self._found.pop(place) for place in places]
