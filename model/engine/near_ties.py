"""Near-ties, decided by the arithmetic of plain decoding.

A token that rounding could exchange is computed again as plain decoding computes it: the rows of the
cache that were read in another way are read again, in the same shapes as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .cache import TreeCache
from .rules import TokenRule, tie_margin
from .target import TargetModel
from .tree import DraftTree
from .verification import Acceptance


class ReferenceRows:
    """Counts the first rows of a text's cache that equal plain decoding's bit for bit.

    Args:
        target: the model.
        cache: of the text.
        prompt_length: tokens of the prompt.

    Attributes:
        margin: as `tie_margin`.
    """

    def __init__(self, target: TargetModel, cache: TreeCache, prompt_length: int) -> None:
        self._target, self._cache, self._prompt_length = target, cache, prompt_length
        self._num_rows = 0
        self._is_reference = False  # whether the step under way is plain decoding itself
        self.margin = tie_margin(target.dtype)

    def read_prompt(self, num_tokens: int) -> None:
        """Take note of a chunk of the prompt that was read."""
        is_first = self._num_rows == self._cache.length - num_tokens  # or all before it are
        is_reference = is_first and self._target.is_reference(num_tokens)
        self._num_rows = self._cache.length if is_reference else 0

    def margin_of(self, tree: DraftTree, base: int, is_plain: bool = True) -> float:
        """Return the margin for the step to come, after `base` rows: 0 where it is plain decoding itself.

        Args:
            tree: of the step.
            base: rows before it.
            is_plain: whether its pass is that of the loop of one text.
        """
        is_root = is_plain and tree.topology.num_nodes == 1
        self._is_reference = (
            is_root and self._num_rows == base and self._target.is_reference(num_rows=1)
        )
        if self._is_reference:
            return 0.0
        if self._num_rows == base:
            self._cache.mark()
        return self.margin

    def with_token_decided(
        self,
        acceptance: Acceptance,
        text: Sequence[int],
        rule: TokenRule | None,
        stop: Callable[[Sequence[int]], bool] | None,
    ) -> Acceptance:
        """Return the acceptance with its open token decided, if it has one, once its rows are kept.

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
        """Return the token that plain decoding puts after `text`, to the last bit.

        The other rows are computed again, those of new tokens one at a time, as plain decoding does: the
        same shapes round alike. Rare enough to cost nothing that can be measured.
        """
        target, cache = self._target, self._cache
        cache.keep(self._num_rows, ())
        with target.reference():
            for _ in target.prefill(text[: self._prompt_length], cache, with_logits=False):
                pass  # nothing is left of the prompt where its rows are plain decoding's
            for token in text[cache.length :]:
                logits = target.forward(DraftTree.chain([token]), cache)
        chosen = None if rule is None else rule.choose(logits[-1], text)
        return int(logits[-1].argmax()) if chosen is None else chosen
