"""Sets up a chat: checks the options, loads the model, loads and saves the matrix."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from ..api.decoder import SpeculativeDecoder
from ..api.defaults import RECYCLING, default_choice
from ..commands.command_line import UserError, first_line, user_errors
from ..commands.files import check_output
from ..commands.loading import check_model, check_prompt, load_target
from ..commands.matrix_file import read_memory, write_memory
from ..engine.drafter import Drafter
from .dialogue import Dialogue, default_drafter, render
from .terminal import printable

NO_TEMPLATE = "the tokenizer has no chat template: the model gets the messages line by line"
# The name of recycling's matrix among the tensors of a drafter's memory.
MATRIX = "adjacency"


class ChatSetup:
    """A chat whose options have been checked as far as possible without the weights.

    Args:
        options: the parsed command line; `model` and `sampling` are the configs made of it.

    Raises:
        UserError: if something given cannot be used.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        if options.save_matrix:
            check_output(options.save_matrix, "save_matrix")
        self._model = check_model(options.model)
        self._method = options.method or self._default_method()
        self._tokenizer = self._model.tokenizer
        self._text_config = self._model.hf_config.get_text_config(decoder=True)
        self._check_prompt()
        self._memory = read_memory(options.load_matrix, self._tokenizer)
        self._drafter = self._checked_drafter()
        self._token_id = self._shown_token()

    def load(self) -> Dialogue:
        target = load_target(self._options.model, self._model)
        options = asdict(self._drafter.config)
        decoder = SpeculativeDecoder(target, self._tokenizer, self._method, **options)
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
        if dialogue is None:
            memory = self._memory
        else:
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
        if not self._options.save_matrix:
            return
        dialogue.use(self._method)
        write_memory(dialogue.decoder.drafter, Path(self._options.save_matrix), self._tokenizer)

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

    def _default_method(self) -> str:
        """Return the method that pays on the device, or the one with a matrix if that is asked for."""
        options = self._options
        if options.load_matrix or options.save_matrix or options.show_matrix is not None:
            return RECYCLING
        return default_choice(self._model.device).method

    def _checked_drafter(self) -> Drafter:
        """Return a drafter of the method with its options; refuse a saved matrix that does not fit."""
        options, method = self._options, self._method
        given = [name for name in ("load_matrix", "save_matrix") if getattr(options, name)]
        size, device = self._text_config.vocab_size, self._model.device
        with user_errors():
            drafter = default_drafter(method, size, device, self._memory)
            if self._memory:
                drafter.load_memory(self._memory)
        if given and not drafter.memory():
            raise UserError(f"{given[0]}: the method {method} keeps nothing across prompts")
        if options.show_matrix is not None and MATRIX not in drafter.memory():
            raise UserError(
                f"show_matrix: the method {method} keeps no matrix; give --method {RECYCLING}"
            )
        return drafter

    def _shown_token(self) -> int:
        """Return the id of the token to show: a number is the id, else the text must be one token."""
        given: str | None = self._options.show_matrix
        if given is None:
            return 0
        if given.isdecimal():
            if int(given) < self._text_config.vocab_size:
                return int(given)
            raise UserError(
                f"show_matrix: got {given}; allowed: ids below {self._text_config.vocab_size}"
            )
        ids: list[int] = self._tokenizer(given, add_special_tokens=False).input_ids
        if len(ids) != 1 and given in self._tokenizer.get_vocab():
            return int(self._tokenizer.get_vocab()[given])
        if len(ids) != 1:
            pieces = " ".join(self._piece(token) for token in ids)
            raise UserError(
                f"show_matrix: {printable(given)!r} is {len(ids)} tokens: {pieces}; give one of "
                "them, or an id"
            )
        return ids[0]

    def _piece(self, token_id: int) -> str:
        return printable(repr(self._tokenizer.convert_ids_to_tokens(token_id)))
