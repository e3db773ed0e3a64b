"""A conversation with a model, turn by turn, with any method.

There is one model and one KV cache: every turn, of any method, reuses the rows of the conversation
so far.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch

from ..api.decoder import SpeculativeDecoder
from ..api.defaults import paying_options
from ..api.output import StreamPiece
from ..api.prompts import chat_ids
from ..engine.drafter import Drafter
from ..methods import drafter_class


class Dialogue:
    """The messages so far, and the decoder that answers the next one.

    Args:
        decoder: model, tokenizer and the first method.
        seed: seed of the draws; turn i draws with seed + i.
        options: options of `SpeculativeDecoder.stream`, such as `max_new_tokens` and `temperature`.
    """

    def __init__(self, decoder: SpeculativeDecoder, seed: int = 0, **options: Any) -> None:
        self.decoder = decoder
        # Of user and assistant in turn, in the form of chat templates.
        self.messages: list[dict[str, str]] = []
        self._seed = seed
        self._options = options
        self._drafters: dict[str, Drafter] = {decoder.method: decoder.drafter}

    def answer(self, text: str) -> Generator[StreamPiece, None, None]:
        """Yield the answer to a message; closing the iterator ends it.

        The yielded part stays in the conversation. A message without any answer is dropped.

        Raises:
            ValueError: if the conversation leaves no room in the model's context.
        """
        asked = {"role": "user", "content": text}
        prompt_ids = render(self.decoder.tokenizer, [*self.messages, asked])
        seed = self._seed + len(self.messages) // 2
        pieces = self.decoder.stream(prompt_ids, seed=seed, **self._options)
        texts: list[str] = []
        try:
            for piece in pieces:
                texts.append(piece.text)
                yield piece
        finally:
            if texts:
                answered = {"role": "assistant", "content": "".join(texts).strip()}
                self.messages += [asked, answered]

    def reset(self) -> None:
        """Forget the conversation; what the methods have learned stays."""
        self.messages = []

    def use(self, method: str) -> None:
        """Switch to another method, with its memory from when it was last used.

        Raises:
            ValueError: if the method is unknown, cannot run here, or has no default for an option.
        """
        if method not in self._drafters:
            target = self.decoder.target
            self._drafters[method] = default_drafter(method, target.vocab_size, target.device)
        self.decoder.drafter = self._drafters[method]
        self.decoder.method = method


def default_drafter(
    method: str,
    vocab_size: int,
    device: torch.device,
    memory: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Drafter:
    """Return the drafter of a method with the default of every option, and the number of nodes that pays.

    A memory may be that of a fixed number of nodes: then so is the drafter.

    Raises:
        ValueError: if the method is unknown, cannot run here, or an option has no default.
    """
    cls = drafter_class(method)
    try:
        drafter = cls(cls.config_class(**paying_options(method, {}, device)), vocab_size, device)
        if memory.keys() - drafter.memory():
            drafter = cls(cls.config_class(), vocab_size, device)
        return drafter
    except ValueError as error:
        options = {field.name for field in fields(cls.config_class)}
        is_option = str(error).partition(":")[0] in options
        why = "has no default for an option: " if is_option else ""
        raise ValueError(f"method {method}: {why}{error}") from error


def render(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the token ids of a prompt that asks for the next answer.

    Uses the tokenizer's chat template; without one, the messages are joined line by line.
    """
    if not getattr(tokenizer, "chat_template", None):
        text = "".join(f"{message['content']}\n" for message in messages)
        return list(tokenizer(text).input_ids)
    return chat_ids(messages, tokenizer)
