"""What is known of a text before it is written: a grammar that it obeys, and a text that it resembles.

Both say which tokens probably follow, and a method may draft them. The grammar also forbids tokens.

Shapes: P tokens of a prefix, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from ..options import integer

if TYPE_CHECKING:  # it need not be installed
    from llguidance._lib import JsonCompileOptions

# A JSON schema, or a grammar in the form of Lark.
GrammarSource: TypeAlias = Mapping[str, Any] | str
NO_LIBRARY = (
    "grammar: needs the package llguidance; install it (pip install token-recycling[grammar])"
)
# One way to write spaces, so that most letters between two values must follow; "x-guidance" may say otherwise.
SPACES: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# Tokens that are guessed at a time, and those that must agree before a place in a prediction is believed.
MOST_GUESSED, FEWEST_ALIKE = 32, 3


class Grammar:
    """The place of a text in a grammar; as a logits processor it leaves the tokens that the grammar allows there.

    Args:
        source: of the grammar.
        tokenizer: of the model.
        vocab_size: number of its logits V.
        ends: tokens that end a text; one of them follows a text that is complete.

    Raises:
        ValueError: if llguidance is not installed, or does not read the grammar.
    """

    def __init__(
        self, source: GrammarSource, tokenizer: Any, vocab_size: int, ends: Collection[int]
    ) -> None:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ValueError(NO_LIBRARY) from error
        if tokenizer is None or not ends:
            raise ValueError(
                "grammar: got it without a tokenizer, or with ignore_eos; allowed: with both an end and a tokenizer"
            )
        if isinstance(source, str):
            text = LLMatcher.grammar_from_lark(source)
        else:
            text = LLMatcher.grammar_from_json_schema(dict(source), SPACES)
        vocabulary = _vocabulary(tokenizer, vocab_size, tuple(sorted(ends)))
        self._matcher = LLMatcher(vocabulary, text, log_level=0)
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().partition("\n")[0]
            raise ValueError(f"grammar: {reason}; allowed: a JSON schema, or a Lark grammar")
        self._begin(0)

    def _begin(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._taken: list[int] = []  # new tokens of the place where the matcher is

    def of_text(self, num_prompt: int) -> Grammar:
        """Return the begin of a text after so many tokens of a prompt."""
        new = copy(self)
        new._matcher = self._matcher.deep_copy()
        new._begin(num_prompt)
        return new

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores [1, V] after these tokens [1, P], -inf for all that the grammar forbids."""
        self._go_to(input_ids[0].tolist())
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=scores.shape[1], bitorder="little").view(bool)
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def guesses(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens of the letters that must follow a text; the model may write the same in others."""
        self._go_to(tokens)
        found: list[int] = self._matcher.compute_ff_tokens()
        return found

    def _go_to(self, tokens: Sequence[int]) -> None:
        """Move the matcher to the end of a text, from that of another one."""
        new, taken = tokens[self._num_prompt :], self._taken
        pairs = enumerate(zip(new, taken, strict=False))
        same = next((index for index, (a, b) in pairs if a != b), min(len(new), len(taken)))
        self._matcher.rollback(len(taken) - same)
        self._matcher.consume_tokens(list(new[same:]))
        self._taken = list(new)


@lru_cache(maxsize=2)  # it takes some tenths of a second
def _vocabulary(tokenizer: Any, vocab_size: int, ends: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, vocab_size, list(ends))


class Prediction:
    """Where a text is in one that was predicted: what follows there is guessed.

    Where the text leaves the prediction, nothing is guessed until its last `FEWEST_ALIKE` tokens stand in the
    prediction; of several such places the first one ahead is taken.
    """

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        self._tokens, self._num_read = list(tokens), num_prompt
        self._place: int | None = 0  # in the prediction, of the token that is next; None: not found
        self._last = 0  # place that was found
        self._places: dict[tuple[int, ...], list[int]] = {}
        for end in range(FEWEST_ALIKE, len(self._tokens) + 1):
            self._places.setdefault(tuple(self._tokens[end - FEWEST_ALIKE : end]), []).append(end)

    def guesses(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens that probably follow a text, which has grown since the last call."""
        for end in range(self._num_read, len(tokens)):
            place = self._place
            if place is not None and self._tokens[place : place + 1] == [tokens[end]]:
                self._place = place + 1
            else:
                found = self._places.get(tuple(tokens[end + 1 - FEWEST_ALIKE : end + 1]), [])
                ahead = (one for one in found if one >= self._last)
                self._place = next(ahead, found[0] if found else None)
            self._last = self._last if self._place is None else self._place
        self._num_read = len(tokens)
        return [] if self._place is None else self._tokens[self._place :][:MOST_GUESSED]


def guesses_of(
    sources: Sequence[Grammar | Prediction],
) -> Callable[[Sequence[int]], Sequence[int]] | None:
    """Return which tokens probably follow a text by the first of these that says any; None without any source."""

    def guesses(tokens: Sequence[int]) -> Sequence[int]:
        found = [source.guesses(tokens) for source in sources]  # each follows the text
        return next(filter(None, found), ())

    return guesses if sources else None


def prediction_ids(prediction: str | Sequence[int], tokenizer: Any, num_tokens: int) -> list[int]:
    """Return the tokens of a predicted text; a `ValueError` for what is no token."""
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ValueError("prediction: got text without a tokenizer; give token ids")
        return list(tokenizer(prediction, add_special_tokens=False).input_ids)
    return [integer("prediction", token, 0, num_tokens - 1) for token in prediction]
