"""Answers of a decoder, whole or in pieces, and text from tokens that arrive step by step.

Shapes: P tokens of the prompt, n new tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.step import StepRecord

# Decoders write it for invalid or incomplete bytes.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A token that is one byte of a character, as sentencepiece writes it.
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
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
        rest = "..." if len(self.text) > SHOWN else ""
        return f"GenerateOutput({self.text[:SHOWN]!r}{rest}, {self.summary()})"


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
        return f"StreamPiece({self.text!r}, token_ids={self.token_ids}, record={self.record!r})"


class TextStream:
    """Decodes a growing list of tokens, piece by piece; the pieces together are the whole text.

    A piece is what the new tokens add to the text of the last piece. So a tokenizer that treats a
    text's first token specially (a leading space) always sees a token before. Without a tokenizer all are empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: list[int] = []  # tokens of the last piece
        self._new: list[int] = []  # tokens that are not yet text
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def add(self, token_ids: Sequence[int], is_last: bool = False) -> str:
        """Return the text that the tokens complete; for the last ones, everything that is left."""
        if self._tokenizer is None:
            return ""
        self._new += token_ids
        settled = len(self._new) if is_last else self._num_settled()
        before = self._decode(self._known)
        text = self._decode(self._known + self._new[:settled])
        if (text.endswith(REPLACEMENT) and not is_last) or not text.startswith(before):
            return text[len(before) :] if is_last else ""
        if len(text) > len(before):
            self._known, self._new = self._new[:settled], self._new[settled:]
        return text[len(before) :]

    def pieces(self, steps: Iterable[StepRecord]) -> Iterator[StreamPiece]:
        """Yield the part of a text that each step adds."""
        for step in steps:
            piece = self.add(step.tokens, is_last=step.stop_reason is not None)
            yield StreamPiece(piece, step.tokens, step)

    def _num_settled(self) -> int:
        """Return the number of new tokens before the bytes at the end.

        Such tokenizers read bytes that follow each other as a whole: after one that fits no character, the
        characters before it are no text either. Special tokens between them leave no trace.
        """
        num = len(self._new)
        for index in reversed(range(num)):
            token = self._new[index]
            if BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token) or ""):
                num = index
            elif token not in self._special:
                break
        return num

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Return their text without special tokens and without cleaning up spaces."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
