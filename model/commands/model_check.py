"""Checks a model on this machine: do drafts change its rows, or the state that they leave?

Verifying k drafted tokens is a pass of k + 1 rows. A library may pick another kernel, or another split of a sum,
for another number of rows. Then the last bits of a row differ, and in half precision greedy texts with and without
drafts part where two logits nearly tie. This library's kernels give a row the same bits beside any others; where
a model or a processor has none, its rows are torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..backends.proofs.packing import shared_passes, why_not_packed
from ..backends.proofs.self_test import self_test
from ..backends.target import TargetModel
from ..engine.tree import DraftTree
from .command_line import UserError
from .loading import check_model, load_target
from .model_options import ModelOptions

# Other rows of a pass, and rows that are compared for each number of them.
COUNTS, POSITIONS = (1, 2, 8, 32), 8
# Tokens before the first of these rows, where the model's context has room for them; states need some.
CONTEXT, LEAST_CONTEXT = 64, 8


class Checked(NamedTuple):
    """What was looked at, what was found, and whether it is as it should be."""

    name: str
    found: str
    is_right: bool = True


def check(options: ModelOptions) -> Iterator[Checked]:
    """Load a model, test it and compare its rows; UserError if that cannot be done."""
    target = load_target(options, check_model(options))
    self_test(target)  # which an earlier start may have passed
    dtype = str(target.dtype).removeprefix("torch.")
    kernels = ", ".join(f"{part} {name}" for part, name in target.kernel_names.items())
    yield Checked("model", f"{options.model_path}, {dtype}, {target.device}; kernels: {kernels}")
    drafts = f"chains only: {target.chain_reason}" if target.chain_only else "chains and trees"
    yield Checked("self-test", f"passed, drafts: {drafts}")
    yield from compared(target)


@torch.inference_mode()
def compared(target: TargetModel) -> Iterator[Checked]:
    """Compare the rows of random tokens alone, beside others, and after kept drafts."""
    most = max(COUNTS) + 1
    limit = target.steady_limit() or CONTEXT + POSITIONS + most
    length = min(CONTEXT + POSITIONS, limit - most)
    if length < LEAST_CONTEXT + POSITIONS:
        least = LEAST_CONTEXT + POSITIONS + most
        raise UserError(f"check: got a context of {limit} tokens; allowed: {least} or more")
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(target.vocab_size, (length,), generator=generator).tolist()
    texts = [ids[:end] for end in range(length - POSITIONS + 1, length + 1)]
    alone = [_drafted_row(target, text, 0) for text in texts]
    ways = {"drafted rows": _drafted_row}
    if not (reason := why_not_packed(target)):
        ways["rows of other texts"] = _packed_row
    for beside, row in ways.items():
        for count in COUNTS:
            found = [row(target, text, count) for text in texts]
            yield _verdict(f"beside {count} {beside}", alone, found)
    if reason:
        yield Checked("rows", f"not beside other texts: {reason}")
    plain, kept = ([_row_after(target, text, drafts) for text in texts] for drafts in (False, True))
    yield _verdict("after a kept draft", plain, kept, "states")


def _verdict(
    where: str, alone: Sequence[torch.Tensor], found: Sequence[torch.Tensor], name: str = "rows"
) -> Checked:
    num_equal = sum(map(torch.equal, alone, found))
    worst = max(float((one - other).abs().max()) for one, other in zip(alone, found, strict=True))
    more = f"; logits differ by up to {worst:.3g}" if num_equal < len(alone) else ""
    text = f"{where}: {num_equal} of {len(alone)} have the same bits{more}"
    return Checked(name, text, num_equal == len(alone))


def _beside(text: Sequence[int], count: int) -> list[int]:
    """Return tokens to stand beside the last one: the text's own, again and again."""
    return [text[place % len(text)] for place in range(count)]


def _drafted_row(target: TargetModel, text: Sequence[int], count: int) -> torch.Tensor:
    """Return the logits after a text's last token, with a draft behind it: half of it a chain, half a star."""
    cache = target.new_cache(len(text) + count + 1)
    for _ in target.prefill(text, cache, with_logits=False):
        pass
    tokens = [text[-1], *_beside(text, count)]
    if target.chain_only_at(cache.length, len(tokens)):
        return target.forward(DraftTree.chain(tokens), cache)[0].float().clone()
    half = 1 + count // 2
    parents = (*range(-1, half - 1), *[0] * (len(tokens) - half))
    return target.forward(DraftTree.from_lists(tokens, parents), cache)[0].float().clone()


def _packed_row(target: TargetModel, text: Sequence[int], count: int) -> torch.Tensor:
    """Return the same by a pass that shorter texts share, with four rows each at most."""
    sizes = [1, *(min(4, count - begin) for begin in range(0, count, 4))]
    passes = shared_passes(target, len(sizes))
    trees, caches = [DraftTree.chain([text[-1]])], []
    trees += [DraftTree.chain(_beside(text[at:], size)) for at, size in enumerate(sizes[1:], 1)]
    for number, size in enumerate(sizes):
        own = target.new_cache(len(text) + size)
        for _ in target.prefill(text[number:], own, with_logits=False):
            pass
        caches.append(passes.new_cache(len(text) + size, own))
    return passes.forward(trees, caches).logits[0][0].float().clone()


def _row_after(target: TargetModel, text: Sequence[int], drafts: bool) -> torch.Tensor:
    """Return the logits after a text whose last tokens were drafted and kept, or read one by one."""
    *kept, last = text[-5:]
    cache = target.new_cache(len(text) + 1)
    for _ in target.prefill(text[:-4], cache, with_logits=False):
        pass
    if not drafts:
        for token in kept:
            base = cache.length
            target.forward(DraftTree.chain([token]), cache)
            cache.keep(base, (0,))
    elif target.chain_only_at(cache.length, 5):
        target.forward(DraftTree.chain([*kept, text[0]]), cache)
        cache.keep(cache.length - 5, range(4))
    else:  # beside a sibling that is not kept
        tree = DraftTree.from_lists([kept[0], text[0], *kept[1:]], (-1, 0, 0, 2, 3))
        target.forward(tree, cache)
        cache.keep(cache.length - 5, (0, 2, 3, 4))
    return target.forward(DraftTree.chain([last]), cache)[0].float().clone()
