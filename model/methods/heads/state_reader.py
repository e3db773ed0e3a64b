"""Base of drafters that read the text from the target model's hidden states, each with the token after it.

Shapes: C tokens in a chunk, D width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from ...engine.drafter import Drafter, VerifiedStep
from ...engine.target import TargetModel
from ...machine.hardware import uploaded
from ..growth.guesses import Guesser

# Hidden states that wait to be read, at most: a rest may be long.
MOST_UNREAD = 64

if TYPE_CHECKING:  # Python 3.10 has none
    from typing import Self


class StateText(Protocol):
    """The rows of one text."""

    def clear(self) -> None:
        """Begin another text."""

    def read(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Read a chunk: hidden states [C, D], and the token after each of them."""

    def sibling(self) -> Self:
        """Return another text, with no row yet, for the same weights."""


Text = TypeVar("Text", bound=StateText)


class StateReader(Guesser, Generic[Text]):
    """A guesser that reads every accepted token from the hidden state before it.

    Tokens are read when it next guesses: while drafting rests, a step costs no pass of the heads.
    """

    def __init__(self, config: Any, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self._target: TargetModel | None = None
        self._text: Text | None = None  # until the model is known
        self._prompt_ids: Sequence[int] = ()
        self._num_read = 0
        self._unread: list[tuple[Sequence[int], torch.Tensor]] = []

    def sibling(self) -> Self:
        """Return a drafter whose text has rows of its own; the weights are shared."""
        sibling = super().sibling()
        sibling._text = self._text.sibling() if self._text else None
        sibling._unread = []
        return sibling

    def check_target(self, target: TargetModel) -> None:
        """Check the model, and make the text for it."""
        super().check_target(target)
        self.for_target(target)

    def for_target(self, target: TargetModel) -> Drafter:
        """Make the text for the model, once; return this drafter.

        Raises:
            ValueError: if the weights do not fit the model, or cannot be loaded.
        """
        if target is not self._target:
            self.check_config(target.config)
            self._text, self._target = self._text_of(target), target
        return self

    def _text_of(self, target: TargetModel) -> Text:
        raise NotImplementedError

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids, self._num_read, self._unread = prompt_ids, 0, []
        if self._text is not None:
            self._text.clear()

    @torch.inference_mode()
    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Read a chunk of the prompt: C hidden states, each with the token after it."""
        assert self._text is not None
        begin, end = self._num_read, self._num_read + len(token_ids)
        self._text.read(self._prompt_ids[begin + 1 : end + 1], hidden)
        self._num_read = end

    @torch.inference_mode()
    def observe(self, step: VerifiedStep) -> None:
        """Keep the accepted tokens and the model's hidden states before them, to be read."""
        if step.stop_reason is None:
            assert step.hidden is not None
            path = uploaded(step.acceptance.path, step.hidden.device)
            self._unread.append((step.acceptance.tokens, step.hidden[path]))
            if sum(len(tokens) for tokens, _ in self._unread) > MOST_UNREAD:
                self.read_text()

    def read_text(self) -> Text | None:
        """Read what is unread; return the text, or None if the model is not known."""
        if self._text is not None and self._unread:
            tokens, hidden = zip(*self._unread, strict=True)
            self._unread = []
            # Joining one alone would launch a copy.
            joined = torch.cat(hidden) if len(hidden) > 1 else hidden[0]
            self._text.read([*chain(*tokens)], joined)
        return self._text
