"""Reference rows: cache rows with the arithmetic of plain decoding, which decides near-ties.

A token that rounding could change is decided from logits that are computed as in plain decoding:
cache rows that were computed in other shapes are first computed again in those shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .cache import TreeCache
from .near_ties import tie_margin
from .rules import TokenRule
from .target import TargetModel
from .tree import DraftTree
from .verification import Acceptance


class ReferenceRows:
    """Keeps count of a text's reference rows: the first rows of its cache that equal plain decoding's.

    Args:
        target: the model.
        cache: the text's cache.
        prompt_length: tokens of the prompt.

    Attributes:
        margin: as `tie_margin`.
    """

    def __init__(self, target: TargetModel, cache: TreeCache, prompt_length: int) -> None:
        self._target, self._cache, self._prompt_length = target, cache, prompt_length
        self._num_rows = 0
        self._is_reference = False  # whether the step under way has the reference arithmetic
        self.margin = tie_margin(target.dtype)

    def read_prompt(self, num_tokens: int) -> None:
        """Note a chunk of the prompt that was read."""
        is_first = self._num_rows == self._cache.length - num_tokens  # or all before it are
        is_reference = is_first and self._target.is_reference(num_tokens)
        self._num_rows = self._cache.length if is_reference else 0

    def margin_of(self, tree: DraftTree, base: int) -> float:
        """Return the tie margin for a step after `base` rows: 0 if the step has the reference arithmetic."""
        is_root = tree.topology.num_nodes == 1
        self._is_reference = (
            is_root and self._num_rows == base and self._target.is_reference(num_rows=1)
        )
        return 0.0 if self._is_reference else self.margin

    def settled(
        self,
        acceptance: Acceptance,
        text: Sequence[int],
        rule: TokenRule | None,
        stop: Callable[[Sequence[int]], bool] | None,
    ) -> Acceptance:
        """Return the acceptance with its open token, if any, decided; call it once the rows are kept.

        Args:
            acceptance: of the last step.
            text: before the step.
            rule: as in `verify`.
            stop: as in `verify`.
        """
        if not acceptance.is_decided:
            text = [*text, *acceptance.tokens]
            token = self._reference_token(text, rule)
            acceptance = acceptance.decided(token, stop is not None and stop([*text, token]))
            self._is_reference = True
        if self._is_reference:
            self._num_rows = self._cache.length
        self._is_reference = False
        return acceptance

    def _reference_token(self, text: Sequence[int], rule: TokenRule | None) -> int:
        """Return the token that plain decoding puts after `text`, with its exact rounding.

        Rows that are not reference rows are computed again, new tokens one at a time: equal shapes
        round alike. This is too rare to show in measured time.
        """
        target, cache = self._target, self._cache
        cache.keep(self._num_rows, ())
        with target.reference():
            for _ in target.prefill(text[: self._prompt_length], cache, with_logits=False):
                pass  # the prompt's rows are reference rows already
            for token in text[cache.length :]:
                logits = target.forward(DraftTree.chain([token], target.device), cache)
        chosen = None if rule is None else rule.choose(logits[-1], text)
        return int(logits[-1].argmax()) if chosen is None else chosen
