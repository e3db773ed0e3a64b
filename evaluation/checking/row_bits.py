"""Does a row of a pass have the same bits whatever rows stand beside it?

Verifying k drafted tokens is a pass of k + 1 rows. A library picks another kernel, another split of a sum, for
another number of rows; in half precision the row's logits then differ in their last bits, and greedy texts with
and without drafts part where two logits nearly tie. Here one row is computed alone and beside others: drafted
tokens after it, and rows of other texts in the same pass.

Shapes: N rows of a pass, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import DynamicCache

from model.engine.packing import why_not_packed
from model.engine.target import TargetModel
from model.engine.tree import DraftTree

STOCK, OURS, OTHER_TEXTS = "transformers", "this library", "this library, other texts"


class RowBits(NamedTuple):
    """How a row fared beside others, over several positions of a text."""

    arithmetic: str  # one of the names above
    num_beside: int
    num_rows: int  # compared
    num_equal: int  # of these, rows with the very bits that they have alone
    largest_difference: float  # of any logit

    @property
    def is_stable(self) -> bool:
        """Whether every row has the bits that it has alone."""
        return self.num_equal == self.num_rows


@torch.inference_mode()
def row_bits(
    target: TargetModel, token_ids: Sequence[int], counts: Sequence[int], num_positions: int
) -> list[RowBits]:
    """Compute rows of a text alone and beside others.

    Args:
        target: a loaded model.
        token_ids: a text; the rows are those of its last `num_positions` tokens.
        counts: how many others stand beside a row.
        num_positions: rows compared for each of the counts, at least 1 and fewer than the text has tokens.

    Returns:
        A line for each arithmetic and count; other texts only where they can share a pass of the model.
    """
    ways = {STOCK: _stock_row, OURS: _our_row}
    if not why_not_packed(target):
        ways[OTHER_TEXTS] = _packed_row
    positions = range(len(token_ids) - num_positions, len(token_ids))
    found = []
    for name, row in ways.items():
        alone = {place: row(target, token_ids[: place + 1], 0) for place in positions}
        for count in counts:
            pairs = [
                (alone[place], row(target, token_ids[: place + 1], count)) for place in positions
            ]
            worst = max(float((one - other).abs().max()) for one, other in pairs)
            num_equal = sum(torch.equal(one, other) for one, other in pairs)
            found.append(RowBits(name, count, len(pairs), num_equal, worst))
    return found


def _beside(text: Sequence[int], count: int) -> list[int]:
    """Return tokens to stand beside the last one: the text's own, again and again."""
    return [text[place % len(text)] for place in range(count)]


def _stock_row(target: TargetModel, text: Sequence[int], count: int) -> torch.Tensor:
    """Return the logits [V] after a text's last token by transformers alone, drafted tokens behind it."""
    model, cache = target.model, DynamicCache(config=target.model.config)
    ids = torch.tensor([list(text)], device=target.device)
    model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
    rows = torch.tensor([[text[-1], *_beside(text, count)]], device=target.device)
    logits = model(input_ids=rows, past_key_values=copy.deepcopy(cache), use_cache=True).logits
    return logits[0, 0].float().clone()


def _our_row(target: TargetModel, text: Sequence[int], count: int) -> torch.Tensor:
    """Return the same by this library's pass over a draft: half of its nodes a chain, half a star."""
    cache = target.new_cache(len(text) + count + 1)
    for _ in target.prefill(text, cache, with_logits=False):
        pass
    tokens = [text[-1], *_beside(text, count)]
    if target.chain_only_at(cache.length, len(tokens)):
        tree = DraftTree.chain(tokens)
    else:
        half = 1 + count // 2
        parents = (*range(-1, half - 1), *[0] * (len(tokens) - half))
        tree = DraftTree.from_lists(tokens, parents)
    return target.forward(tree, cache)[0].float().clone()


def _packed_row(target: TargetModel, text: Sequence[int], count: int) -> torch.Tensor:
    """Return the same by a pass that other texts share, with four rows each at most."""
    sizes = [min(4, count - begin) for begin in range(0, count, 4)]
    trees, caches = [DraftTree.chain([text[-1]])], [target.new_cache(len(text) + 1)]
    for number, size in enumerate(sizes, start=1):
        trees.append(DraftTree.chain(_beside(text[number:], size)))
        caches.append(target.new_cache(len(text) + size))
    for number, cache in enumerate(caches):
        # Other texts are shorter, each by another number of tokens.
        for _ in target.prefill(text[number % (len(text) - 1) :], cache, with_logits=False):
            pass
    return target.forward_packed(trees, caches)[0].float().clone()
