"""Requests: the text that is asked for, how long it may get, and why it ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..options import integer
from .backend import Backend
from .budget import MAX_DRAFT
from .rules import TokenRule
from .step import StepRecord
from .verification import Acceptance


class Request(NamedTuple):
    """A text that is asked for, on its way from a caller to its last step. Limits are in tokens.

    Attributes:
        prompt_ids: token ids of the prompt, at least one.
        max_new_tokens: limit; exact for every method.
        eos_ids: token ids that end the text; the one that ends it is emitted.
        rule: None for greedy decoding, else how each token is chosen.
        stop: asked after every new token, with the text so far, whether it ends the text.
        context: prompt and answer together. This and what follows is found by `checked`.
        num_visible: new tokens that are emitted.
        num_total: new tokens until the loop ends; more than `num_visible` when a published code
            that runs past the limit is reproduced.
        name: the limit that comes first, "length" or "context".
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    eos_ids: Collection[int] = ()
    rule: TokenRule | None = None
    stop: Callable[[Sequence[int]], bool] | None = None
    context: int = 0
    num_visible: int = 0
    num_total: int = 0
    name: str = ""

    def checked(self, target: Backend, overrun: int = 0) -> Request:
        """Return the request with its limits. Greedy decoding goes `overrun` tokens past the limit, unseen.

        Raises:
            ValueError: if the prompt is empty, holds a token that the model does not have or leaves no
                room in the context, or if max_new_tokens < 1.
        """
        limit = integer("max_new_tokens", self.max_new_tokens, least=1)
        length, num_tokens = len(self.prompt_ids), target.num_tokens
        if not length:
            raise ValueError("prompt: got no token; allowed: at least one")
        if outside := [token for token in self.prompt_ids if not 0 <= token < num_tokens]:
            raise ValueError(f"prompt: got token {outside[0]}; allowed: 0 to {num_tokens - 1}")
        context = target.context_limit(length)
        if context is None:
            context = length + limit + MAX_DRAFT
        room = context - length
        if room < 1:
            raise ValueError(
                f"prompt: got {length} tokens; allowed: fewer than the model's context of "
                f"{context}; shorten the prompt"
            )
        num_visible = min(limit, room)
        if not self.is_greedy:
            # Unseen steps would draw from the generator of the next answer, and ask the user's
            # criteria about tokens that are never emitted.
            overrun = 0
        return self._replace(
            context=context,
            num_visible=num_visible,
            num_total=min(num_visible + overrun, room),
            name="length" if num_visible == limit else "context",
        )

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are the argmax and no stopping criterion is asked."""
        return self.rule is None and self.stop is None

    def stop_reason(self, acceptance: Acceptance, num_emitted: int) -> str | None:
        """Return why the loop ends after `num_emitted` tokens, None if it goes on.

        The limit is checked before an end-of-text bonus token, as in the published loop.
        """
        if num_emitted >= self.num_total:
            return "criteria" if acceptance.is_stopped else self.name
        return self._end_of(acceptance.tokens, acceptance.is_stopped)

    def visible(self, record: StepRecord, num_emitted: int) -> StepRecord | None:
        """Return a step, up to which `num_emitted` tokens exist, cut at the limit; None if nothing is left."""
        num_hidden = max(0, num_emitted - self.num_visible)
        tokens = record.tokens[: max(0, len(record.tokens) - num_hidden)]
        if not tokens:
            return None
        reason = self._end_of(tokens, record.stop_reason == "criteria")
        if reason is None and num_emitted >= self.num_visible:
            reason = self.name
        return replace(record, tokens=tokens, stop_reason=reason)

    def _end_of(self, tokens: Sequence[int], is_stopped: bool) -> str | None:
        if tokens[-1] in self.eos_ids:
            return "eos"
        return "criteria" if is_stopped else None
