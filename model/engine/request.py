"""Requests: how tokens are chosen, how long an answer may get, and why it ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..options import integer
from .budget import MAX_DRAFT
from .rules import TokenRule
from .step import StepRecord
from .target import TargetModel
from .verification import Acceptance


class Request(NamedTuple):
    """A checked request. Limits are in tokens.

    Attributes:
        context: prompt and answer together.
        num_visible: new tokens that are emitted.
        num_total: new tokens until the loop ends; more than `num_visible` when a published code
            that runs past the limit is reproduced.
        name: the limit that comes first, "length" or "context".
        eos_ids: token ids that end the text.
        rule: None for greedy decoding, else how each token is chosen.
        stop: asked after every new token whether it ends the text.
    """

    context: int
    num_visible: int
    num_total: int
    name: str
    eos_ids: Collection[int]
    rule: TokenRule | None
    stop: Callable[[Sequence[int]], bool] | None

    @classmethod
    def of(
        cls,
        target: TargetModel,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        eos_ids: Collection[int],
        rule: TokenRule | None,
        stop: Callable[[Sequence[int]], bool] | None,
        overrun: int,
    ) -> Request:
        """Check the arguments of `decode`. Greedy decoding goes `overrun` tokens past the limit, unseen.

        Raises:
            ValueError: if the prompt is empty or leaves no room in the context, or max_new_tokens < 1.
        """
        limit = integer("max_new_tokens", max_new_tokens, least=1)
        if not prompt_ids:
            raise ValueError("prompt: got no token; allowed: at least one")
        context = target.context_limit(len(prompt_ids))
        if context is None:
            context = len(prompt_ids) + limit + MAX_DRAFT
        room = context - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"prompt: got {len(prompt_ids)} tokens; allowed: fewer than the model's context of "
                f"{context}; shorten the prompt"
            )
        num_visible = min(limit, room)
        if rule is not None or stop is not None:
            # Unseen steps would draw from the generator of the next answer, and ask the user's
            # criteria about tokens that are never emitted.
            overrun = 0
        name = "length" if num_visible == limit else "context"
        num_total = min(num_visible + overrun, room)
        return cls(context, num_visible, num_total, name, eos_ids, rule, stop)

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
