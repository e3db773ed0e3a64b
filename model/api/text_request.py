"""A text that is asked for, as the decoding loops take it, and what is checked before it waits for its turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..engine.request import Request
from ..engine.rules import TokenRule
from ..engine.target import TargetModel


class TextRequest(NamedTuple):
    """The arguments of `model.engine.loop.decode` and `Batch.add`, by their names there."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    eos_ids: Collection[int] = ()
    rule: TokenRule | None = None
    stop: Callable[[Sequence[int]], bool] | None = None

    def check(self, target: TargetModel) -> None:
        """Check the prompt and the limit.

        Raises:
            ValueError: as `decode`, and if a token is not in the model's vocabulary.
        """
        num_tokens = target.num_tokens
        if outside := [token for token in self.prompt_ids if not 0 <= token < num_tokens]:
            raise ValueError(f"prompt: got token {outside[0]}; allowed: 0 to {num_tokens - 1}")
        Request.of(target, *self, overrun=0)
