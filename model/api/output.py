"""Answers of a decoder: whole, or in pieces.

Shapes: P tokens of the prompt, n new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..engine.step import StepRecord

SHOWN = 60  # characters of a text in an output's repr


@dataclass(frozen=True, slots=True, repr=False)
class GenerateOutput:
    """A whole answer.

    Attributes:
        sequences: prompt and new tokens, int64 [1, P + n], on the model's device.
        token_ids: the n new tokens.
        text: the new tokens as text, special tokens left out; empty without a tokenizer.
        steps: a record of every step, in order.
        prefill_time: seconds to read the prompt.
        decode_time: seconds of the steps after that, which the texts of a batch share; the time in which other
            texts had their turn is in neither.
    """

    sequences: torch.Tensor
    token_ids: list[int]
    text: str
    steps: list[StepRecord]
    prefill_time: float
    decode_time: float

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
        """Why the text ended: "eos", "criteria" (such as a stop string), "length" or "context"."""
        return self.steps[-1].stop_reason

    def summary(self) -> str:
        """Return the figures in one line."""
        return (
            f"{len(self.token_ids)} tokens in {len(self.steps)} steps: {self.mean_accepted_tokens:.2f} tokens "
            f"a step (MAT), {self.tokens_per_second:.1f} tokens/s; prompt {self.prefill_time:.3f} s, answer "
            f"{self.decode_time:.3f} s; ended by {self.stop_reason}"
        )

    def __repr__(self) -> str:
        """Return the beginning of the text and the figures."""
        return f"GenerateOutput({shorten(self.text)}, {self.summary()})"


@dataclass(frozen=True, slots=True, repr=False)
class StreamPiece:
    """The part of a streamed text that one step adds.

    Attributes:
        text: complete characters; may be empty, for an incomplete character or special tokens.
        token_ids: the step's tokens.
        record: the step.
    """

    text: str
    token_ids: list[int]
    record: StepRecord

    def __str__(self) -> str:
        """Return the text, so that a piece can be printed."""
        return self.text

    def __repr__(self) -> str:
        """Return text, tokens and a word about the step."""
        return f"StreamPiece({self.text!r}, token_ids={self.token_ids}, record={self.record!r})"


def shorten(text: str) -> str:
    """Return a text as Python writes it, its beginning if it is long."""
    return repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}..."
