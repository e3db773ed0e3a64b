"""Text from tokens that arrive step by step: pieces of a stream, and whole answers.

Shapes: P tokens of the prompt, n new tokens.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.sequence import Request
from ..engine.step import StepRecord
from .output import GenerateOutput, Logprobs, StreamPiece

# Decoders write it for invalid or incomplete bytes.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A token that is one byte of a character, as sentencepiece writes it.
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class TextStream:
    """Decodes a growing list of tokens, piece by piece; the pieces together are the whole text.

    A piece is what the new tokens add to the text of the last piece. So a tokenizer that treats a
    text's first token specially (a leading space) always sees a token before. Without a tokenizer all are empty.
    What may begin a stop string is held back; the text ends before the one that ends it, `stop_string`.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop, self._held = stop, ""
        self.stop_string: str | None = None
        self._known: list[int] = []  # tokens of the last piece
        self._new: list[int] = []  # tokens that are not yet text
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def add(self, token_ids: Sequence[int], is_last: bool = False, may_stop: bool = True) -> str:
        """Return the text that the tokens complete; for the last ones, everything that is left.

        A stop string ends the text if it may stop here, which criteria on tokens may see otherwise.
        """
        text = self._added(token_ids, is_last)
        if not self._stop:
            return text
        self._held += text
        found = [(place, one) for one in self._stop if (place := self._held.find(one)) >= 0]
        if found and may_stop:
            end, self.stop_string = min(found)
        else:
            end = len(self._held) - (0 if is_last else self._num_open())
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _num_open(self) -> int:
        """Return the number of characters at the end that may be the beginning of a stop string."""
        longest = max(map(len, self._stop)) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(one.startswith(self._held[-count:]) for one in self._stop):
                return count
        return 0

    def _added(self, token_ids: Sequence[int], is_last: bool) -> str:
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


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is asked for, and what is made of its steps."""

    request: Request
    tokenizer: Any
    stop: Sequence[str] = ()
    logprobs: Logprobs | None = None  # also the first processor of the request's rule

    def pieces(self, steps: Iterable[StepRecord]) -> Generator[StreamPiece, None, None]:
        """Yield the part of the text that each step adds."""
        stream = TextStream(self.tokenizer, self.stop)
        for step in steps:
            is_stopped = step.stop_reason == "criteria"
            text = stream.add(step.tokens, step.stop_reason is not None, is_stopped)
            found = stream.stop_string
            if is_stopped and found is None:
                found = self._unseen(step.tokens)
            logprobs = self.logprobs.take(step.tokens) if self.logprobs else None
            yield StreamPiece(text, step.tokens, step, found, logprobs)

    def _unseen(self, tokens: Sequence[int]) -> str | None:
        """Return the stop string of special tokens, or begun in the prompt, that ended the text."""
        longest = max(map(len, self.stop))
        ids = [*self.request.prompt_ids[-longest:], *tokens]
        text: str = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return next((one for one in self.stop if one in text), None)

    def output(self, steps: Sequence[StepRecord], device: torch.device) -> GenerateOutput:
        """Return the whole answer."""
        pieces = list(self.pieces(steps))
        token_ids = [token for piece in pieces for token in piece.token_ids]
        return GenerateOutput(
            sequences=torch.tensor([[*self.request.prompt_ids, *token_ids]], device=device),
            token_ids=token_ids,
            text="".join(piece.text for piece in pieces),
            steps=list(steps),
            prefill_time=steps[0].prefill_ns / 1e9,
            decode_time=sum(step.step_ns for step in steps) / 1e9,
            stop_string=pieces[-1].stop_string,
            logprobs=[one for piece in pieces for one in piece.logprobs or ()]
            if self.logprobs
            else None,
        )
