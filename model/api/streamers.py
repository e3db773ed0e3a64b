"""Streamers of transformers: what a decoded text hands them, and that they always end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch


class Streamer(Protocol):
    """Takes tokens, such as transformers' `TextStreamer`."""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt [1, P], then new tokens [n]."""

    def end(self) -> None:
        """Take note that no more come."""


class TokenStream:
    """Hands a text to a streamer.

    Args:
        streamer: None takes nothing.
        is_by_token: one token at a time, as `generate` does and a streamer may expect; else the tokens of
            a step together.
        has_prompt: the streamer has got the prompt already.
    """

    def __init__(
        self, streamer: Streamer | None, is_by_token: bool = True, has_prompt: bool = False
    ) -> None:
        self._streamer = streamer
        self._is_by_token = is_by_token
        self._has_prompt = has_prompt

    def begin(self, input_ids: torch.Tensor) -> None:
        """Hand over the prompt [1, P]."""
        if self._streamer is not None and not self._has_prompt:
            self._streamer.put(input_ids.cpu())

    def add(self, tokens: Sequence[int]) -> None:
        """Hand over the tokens of a step."""
        if self._streamer is None:
            return
        parts = [[token] for token in tokens] if self._is_by_token else [tokens]
        for part in parts:
            self._streamer.put(torch.tensor(part, device="cpu"))

    def end(self) -> None:
        """Say that the text has ended."""
        if self._streamer is not None:
            self._streamer.end()


@contextmanager
def ended_on_error(streamer: Streamer | None) -> Iterator[None]:
    """End a streamer when an error leaves, as whoever reads it in another thread would wait for ever."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            with suppress(Exception):  # the first error is the one to be seen
                streamer.end()
        raise
