"""Whether sequences can share passes of a loaded model, and in which layout (`shared_passes`).

The config shows what depends on the whole pass, such as positions scaled by the longest sequence; the rest is
proved: a shared pass over three sequences must give the logits of three passes. On a CPU sequences are packed; a
model that makes other keys of those of the cache, or has an attention of its own, takes them as a batch instead, as
on a GPU.

Shapes: S nodes of all sequences, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ...engine.backend import PrefixRows
from ...engine.batch import Batch, Permit, SharedPasses
from ...engine.drafter import Drafter
from ...engine.tree import DraftTree, TreeTopology
from ..passes.cache import TreeCache
from ..passes.packed import PackedPasses
from ..passes.slot_passes import SlotPasses
from ..target import TargetModel
from .plain_decoding import with_short_windows
from .self_test import PREFIX_LENGTH, Probe, allowed_difference

logger = logging.getLogger(__name__)

NAME = "packing"
# Three sequences of different lengths: a tree, the root alone, a chain.
LENGTHS = (PREFIX_LENGTH, 3, PREFIX_LENGTH - 4)
TOPOLOGIES = (
    TreeTopology.from_parents((-1, 0, 0, 1, 1, 3)),
    TreeTopology.chain(1),
    TreeTopology.chain(3),
)
# Of each sequence's cache: its prefix and the largest tree.
ROWS = PREFIX_LENGTH + max(one.num_nodes for one in TOPOLOGIES)


def why_not_packed(target: TargetModel) -> str:
    """Return why several sequences cannot share a pass of this model, in one line; empty if they can.

    Found once for a target, by a shared pass.
    """
    with target.lock:
        if NAME not in target.measured:
            target.measured[NAME] = reason = _reason(target)
            if reason:
                logger.info("model type %s: %s", target.config.model_type, reason)
        found: str = target.measured[NAME]
        return found


def shared_passes(target: TargetModel, size: int) -> SharedPasses:
    """Return the passes of a batch of up to `size` sequences, for a model whose sequences can share passes."""
    if not target.uses_slots:
        return PackedPasses(target)
    return target.slot_passes(size) or SlotPasses(target, size)


def batch_of(
    target: TargetModel,
    drafter: Drafter,
    size: int,
    budget: Any = None,
    shares_memory: bool = True,
    permit: Permit | None = None,
    prefix_cache: PrefixRows | None = None,
) -> Batch:
    """Return a `Batch` whose sequences share passes if those of this model can; else a warning says why not."""
    reason = why_not_packed(target) if size > 1 else ""
    if reason:
        logger.warning(
            "model type %s: texts of a batch are decoded one after another, since %s",
            target.config.model_type,
            reason,
        )
    passes = shared_passes(target, size) if size > 1 and not reason else None
    if target.uses_slots or target.device.type != "cpu":
        prefix_cache = None  # rows are those of slots
    return Batch(target, drafter, size, passes, budget, shares_memory, permit, prefix_cache)


def _reason(target: TargetModel) -> str:
    if target.mixers:
        return "it keeps recurrent states, which are read text by text"
    if target.chain_only:
        return f"drafts must be chains: {target.chain_reason}"
    if any(shape and shape.index_keys for shape in target.layer_shapes):
        return "its layers choose among keys by an index of their own"
    if target.borders.rope:
        return "its rotary embeddings depend on the longest text of a pass"
    if target.borders.query_step:
        return "it scales queries by their place among the keys of a pass"
    tested = with_short_windows(target)
    reason = _proved(tested)
    if reason and not tested.uses_slots and tested.is_on_one_device:
        tested.uses_slots = True
        in_slots = not _proved(tested)
        tested.uses_slots = target.uses_slots = in_slots
        return "" if in_slots else reason
    return reason


@torch.inference_mode()
def _proved(target: TargetModel) -> str:
    """Return why a shared pass over three sequences fails, or gives other logits than three passes; empty if it is
    right.
    """
    limit = target.context_limit()
    if limit is not None and limit < ROWS:
        return f"its context of {limit} tokens is too short for the test"
    probes = [
        Probe.random(target.vocab_size, is_chain=False, prefix_length=length) for length in LENGTHS
    ]
    trees = [
        DraftTree(torch.tensor(probe.nodes[: topology.num_nodes], device=target.device), topology)
        for probe, topology in zip(probes, TOPOLOGIES, strict=True)
    ]
    # Some targets put all logits in one place.
    alone = torch.cat(
        [
            target.forward(tree, _filled(target, probe, target.new_cache(ROWS))).float().clone()
            for probe, tree in zip(probes, trees, strict=True)
        ]
    )
    try:
        passes = shared_passes(target, len(probes))
        caches = [_filled(target, probe, passes.new_cache(ROWS)) for probe in probes]
        shared = torch.cat([part.float() for part in passes.forward(trees, caches).logits])
    except Exception as error:  # a model's own code may raise anything
        reason = (str(error).splitlines() or [""])[0]
        return f"a shared pass fails: {type(error).__name__}: {reason}"
    allowed = allowed_difference(target, probes[0], alone)
    difference = float((shared - alone).abs().max())
    if difference <= allowed:  # never for a NaN
        return ""
    return f"the logits of a shared pass differ by {difference:.1e} (allowed: {allowed:.1e})"


def _filled(target: TargetModel, probe: Probe, cache: TreeCache) -> TreeCache:
    """Return the cache with a probe's prefix."""
    for _ in target.prefill([*probe.prefix, probe.nodes[0]], cache, with_logits=False):
        pass
    return cache
