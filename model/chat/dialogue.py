"""A conversation with a model, turn by turn, with any method; what is checked before it, and what is saved after.

There is one model and one KV cache: every turn, of any method, reuses the rows of the conversation so far.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..api.decoder import SpeculativeDecoder
from ..api.defaults import AVERAGED, default_choice, paying_options
from ..api.output import StreamPiece
from ..api.prompts import chat_ids
from ..commands.command_line import UserError, first_line, printable, user_errors
from ..commands.files import check_output
from ..commands.loading import check_model, check_prompt, load_target, read_memory, write_memory
from ..engine.drafter import Drafter
from ..methods import CustomMethod, drafter_class

NO_TEMPLATE = "the tokenizer has no chat template: the model gets the messages line by line"
# The name of recycling's matrix among the tensors of a drafter's memory.
MATRIX = "adjacency"


class Dialogue:
    """The messages so far, and the decoder that answers the next one; turn i draws with seed + i.

    `options` are those of `SpeculativeDecoder.stream`, such as `max_new_tokens` and `temperature`.
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
        """Switch to another method, with its memory from when it was last used; ValueError as `default_drafter`."""
        if method not in self._drafters:
            target = self.decoder.target
            self._drafters[method] = default_drafter(method, target.vocab_size, target.device)
        self.decoder.drafter = self.decoder.queue.drafter = self._drafters[method]
        self.decoder.method = method


def default_drafter(
    method: str,
    vocab_size: int,
    device: torch.device,
    memory: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Drafter:
    """Return the drafter of a method with the default of every option, and the number of nodes that pays.

    A memory may be that of a fixed number of nodes: then so is the drafter. ValueError if there is no such drafter.
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
    """Return the token ids of a prompt that asks for the next answer; without a chat template, lines are joined."""
    if not getattr(tokenizer, "chat_template", None):
        text = "".join(f"{message['content']}\n" for message in messages)
        return list(tokenizer(text).input_ids)
    return chat_ids(messages, tokenizer)


class ChatSetup:
    """A chat whose options have been checked as far as possible without the weights.

    Its argument is the parsed command line; `model` and `sampling` are the configs made of it.

    Raises:
        UserError: if something given cannot be used.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        if options.save_matrix:
            check_output(options.save_matrix, "save_matrix")
        self._model = check_model(options.model)
        wants_matrix = options.load_matrix or options.save_matrix or options.show_matrix is not None
        paying = AVERAGED if wants_matrix else default_choice(self._model.device).method
        self._method = options.method or paying
        self._tokenizer = self._model.tokenizer
        self._vocab_size = self._model.hf_config.get_text_config(decoder=True).vocab_size
        self._check_prompt()
        self._memory = read_memory(options.load_matrix, self._tokenizer)
        self._drafter = self._checked_drafter()
        self._token_id = self._shown_token()

    def load(self) -> Dialogue:
        target = load_target(self._options.model, self._model)
        options = asdict(self._drafter.config)
        decoder = SpeculativeDecoder(target, self._tokenizer, CustomMethod(self._method), **options)
        if self._memory:
            decoder.drafter.load_memory(self._memory)
        return Dialogue(decoder, **asdict(self._options.sampling))

    def notices(self, dialogue: Dialogue) -> list[str]:
        """Return the notes for the user before the first answer."""
        target = dialogue.decoder.target
        chain = f"chain drafts only: {target.chain_reason}" if target.chain_only else ""
        bare = "" if getattr(self._tokenizer, "chat_template", None) else NO_TEMPLATE
        return [note for note in (chain, bare) if note]

    def matrix_report(self, dialogue: Dialogue | None = None) -> str:
        """Return the row of the token asked for, one successor a line; without a dialogue of the saved matrix."""
        memory = self._memory
        if dialogue is not None:
            dialogue.use(self._method)
            memory = dialogue.decoder.drafter.memory()
        successors = memory[MATRIX][self._token_id].tolist()
        head = f"token {self._token_id} {self._piece(self._token_id)}: "
        if not any(successors):
            return head + "nothing learned yet"
        rows = [
            f"{rank:4d} {token:7d} {self._piece(token)}" for rank, token in enumerate(successors)
        ]
        return "\n".join([head + "what may follow, by rank, id and piece", *rows])

    def save(self, dialogue: Dialogue) -> None:
        if self._options.save_matrix:
            dialogue.use(self._method)
            drafter = dialogue.decoder.drafter
            write_memory(drafter, Path(self._options.save_matrix), self._tokenizer)

    def _check_prompt(self) -> None:
        """Refuse a prompt that does not fit the context, and a chat template that fails."""
        message = {"role": "user", "content": self._options.prompt or "Hello"}
        try:
            length = len(render(self._tokenizer, [message]))
        # A template is a program of the model's author: it may raise anything.
        except Exception as error:
            reason = first_line(error.__cause__ or error)
            raise UserError(
                f"model_path {self._options.model.model_path}: its chat template fails: {reason}"
            ) from error
        check_prompt(self._model, length)

    def _checked_drafter(self) -> Drafter:
        """Return a drafter of the method with its options; refuse a saved matrix that does not fit."""
        options, method = self._options, self._method
        given = [name for name in ("load_matrix", "save_matrix") if getattr(options, name)]
        with user_errors():
            drafter = default_drafter(method, self._vocab_size, self._model.device, self._memory)
            if self._memory:
                drafter.load_memory(self._memory)
        if given and not drafter.memory():
            raise UserError(f"{given[0]}: the method {method} keeps nothing across prompts")
        if options.show_matrix is not None and MATRIX not in drafter.memory():
            raise UserError(
                f"show_matrix: the method {method} keeps no matrix; give --method {AVERAGED}"
            )
        return drafter

    def _shown_token(self) -> int:
        given: str | None = self._options.show_matrix
        if given is None:
            return 0
        if given.isdecimal():
            if int(given) < self._vocab_size:
                return int(given)
            raise UserError(f"show_matrix: got {given}; allowed: ids below {self._vocab_size}")
        ids: list[int] = self._tokenizer(given, add_special_tokens=False).input_ids
        if len(ids) != 1:
            if given in self._tokenizer.get_vocab():
                return int(self._tokenizer.get_vocab()[given])
            pieces = " ".join(self._piece(token) for token in ids)
            raise UserError(
                f"show_matrix: {printable(given)!r} is {len(ids)} tokens: {pieces}; give one of "
                "them, or an id"
            )
        return ids[0]

    def _piece(self, token_id: int) -> str:
        return printable(repr(self._tokenizer.convert_ids_to_tokens(token_id)))
