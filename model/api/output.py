"""Answers of a decoder: whole, or in pieces.

Shapes: P tokens of the prompt, n new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..engine.step import StepRecord


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """A whole answer.

    Attributes:
        sequences: prompt and new tokens, int64 [1, P + n], on the model's device.
        token_ids: the n new tokens.
        text: the new tokens as text, special tokens left out; empty without a tokenizer.
        steps: a record of every step, in order.
        prefill_time: seconds to read the prompt.
        decode_time: seconds of the steps after that; the time in which other texts had their turn is in neither.
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
    def stop_reason(self) -> str | None:
        """Why the text ended: "eos", "criteria" (such as a stop string), "length" or "context"."""
        return self.steps[-1].stop_reason


@dataclass(frozen=True, slots=True)
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
