"""Packed passes: the nodes of several sequences side by side as one row of tokens, each sequence with a cache of
its own.

Linear layers, norms and activations treat every token by itself, so only attention must tell sequences apart. A
layer of the pass's cache gives each sequence its own new rows, and hands on all rows of every sequence, tied to
the keys that it returns; `model.kernels.registered_attention` attends sequence by sequence. A model that makes
other keys of them fails there, and has its sequences in slots (`model.backends.proofs.packing`).

Shapes: B sequences, S nodes of all sequences, H key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from transformers import Cache

from ...engine.batch import SharedPass
from ...engine.read_out import Candidates, ReadOut, read_out
from ...engine.tree import DraftTree, TreeTopology
from ...kernels.registered_attention import SequenceRows, with_sequences
from ...kernels.short_pass import short_pass_kernel
from ...machine.hardware import uploaded
from ..target import TargetModel
from .cache import MadeLayer, TreeCache, TreeCacheLayer
from .masks import Masks, TreeMasks
from .probes import probes_of_nodes


class PackedLayer(MadeLayer):
    """One layer of the caches of several sequences.

    Args:
        layers: of the sequences.
        sizes: nodes of each sequence, S in all.
        is_masked: whether a sequence with a single node needs its mask, too: where layers have windows.
    """

    def __init__(
        self, layers: Sequence[TreeCacheLayer], sizes: Sequence[int], is_masked: bool
    ) -> None:
        super().__init__()
        self._layers, self._sizes, self._is_masked = layers, sizes, is_masked

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows [1, H, S, D], each to its sequence; return them, tied to all rows of every sequence."""
        buffers = [layer.keys for layer in self._layers], [layer.values for layer in self._layers]
        is_same = buffers[0][0].dtype == key_states.dtype and key_states.device.type == "cpu"
        if is_same and short_pass_kernel():
            begins = [
                layer.claim(size) for layer, size in zip(self._layers, self._sizes, strict=True)
            ]
            torch.ops.token_recycling.append_texts.default(
                key_states, value_states, *buffers, self._sizes, begins
            )
        else:
            parts = (states.split(self._sizes, 2) for states in (key_states, value_states))
            for layer, *rows in zip(self._layers, *parts, strict=True):
                layer.update(*rows)
        ends = [layer.length for layer in self._layers]
        sequences = SequenceRows(self._sizes, ends, *buffers, self._is_masked)
        return with_sequences(key_states, sequences), value_states

    def get_seq_length(self, *args: object) -> int:
        """Return the most rows in use of any sequence."""
        return max(layer.length for layer in self._layers)

    def get_max_length(self) -> int:
        """Return the smallest capacity."""
        return min(layer.get_max_length() for layer in self._layers)

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """Return the key length of the longest sequence, and the offset; no mask is made by it, since all are
        given.
        """
        return self.get_seq_length() + max(self._sizes), 0


class PackedPasses:
    """The packed passes of a batch (`SharedPasses`); one sequence alone has the pass of the single loop."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target

    def new_cache(self, capacity: int, first: TreeCache | None = None) -> TreeCache:
        return self._target.new_cache(capacity) if first is None else first

    def release(self, cache: TreeCache) -> None:
        """Do nothing: a sequence's rows are its own."""

    def is_plain(self, num_sequences: int) -> bool:
        return num_sequences == 1

    def forward(self, trees: Sequence[DraftTree], caches: Sequence[TreeCache]) -> SharedPass:
        if len(trees) == 1:
            tree, cache = trees[0], caches[0]
            alone = self._target.forward(tree, cache)
            read = partial(self._target.read_out, cache, tree, alone)
            return SharedPass([alone], lambda *kind: [read(*kind)])
        logits = self._logits(trees, caches)
        parts = logits.split([tree.topology.num_nodes for tree in trees])
        return SharedPass(parts, partial(read_out_of_sequences, trees, logits))

    def _logits(self, trees: Sequence[DraftTree], caches: Sequence[TreeCache]) -> torch.Tensor:
        """Append the nodes of each tree to its sequence's cache; return the logits after every node, [S, V]."""
        target = self._target
        topologies = [tree.topology for tree in trees]
        bases = [cache.length for cache in caches]
        sizes = [topology.num_nodes for topology in topologies]
        token_ids = uploaded(torch.cat([tree.token_ids for tree in trees]), target.device)
        depths = [topology.depth_tensor(target.device) for topology in topologies]
        positions = torch.cat([part + base for part, base in zip(depths, bases, strict=True)])
        with target.kernels(len(token_ids), is_packed=True):
            masks = masks_of_sequences(target.masks, topologies, bases, target.device, target.dtype)
            layers = zip(*(cache.layers for cache in caches), strict=True)
            is_masked = target.masks.has_windows  # a single node, too
            cache = Cache(layers=[PackedLayer(some, sizes, is_masked) for some in layers])
            probes = probes_of_nodes(trees)
            return target.run(token_ids, max(bases), cache, masks, positions, probes=probes)


def read_out_of_sequences(
    trees: Sequence[DraftTree], logits: torch.Tensor, num_candidates: int, with_samples: bool
) -> list[ReadOut]:
    """Copy what is read of a pass over several sequences' trees, S nodes in all, to the host in one transfer.

    Arguments are as of `read_out`; returns each sequence's part.
    """
    # Of its shape the number of nodes alone is read.
    whole = DraftTree(
        torch.cat([tree.token_ids for tree in trees]), TreeTopology.chain(len(logits))
    )
    tokens, candidates, samples, gaps = read_out(whole, logits, num_candidates, with_samples)
    found, begin = [], 0
    for tree in trees:
        rows = slice(begin, begin + tree.topology.num_nodes)
        part = Candidates(candidates.token_ids[rows], candidates.logits[rows])
        own = None if samples is None else samples[rows]
        found.append(ReadOut(tokens[rows], part, own, gaps[rows]))
        begin = rows.stop
    return found


def masks_of_sequences(
    kinds: TreeMasks,
    topologies: Sequence[TreeTopology],
    bases: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Masks:
    """Return the mask(s) [1, 1, S, T] of several sequences' trees, S nodes in all, T keys of the longest sequence.

    A row begins with the keys of its own sequence, and says nothing beyond them.
    """
    queries = torch.cat(
        [
            topology.depth_tensor(device) + base
            for topology, base in zip(topologies, bases, strict=True)
        ]
    )
    num_keys = max(
        base + topology.num_nodes for topology, base in zip(topologies, bases, strict=True)
    )
    full = torch.zeros(len(queries), num_keys, dtype=dtype, device=device)
    keys = queries
    if kinds.has_windows:
        keys = torch.arange(num_keys, device=device).repeat(len(queries), 1)  # [S, T]
    begin = 0
    for topology, base in zip(topologies, bases, strict=True):
        end = begin + topology.num_nodes
        nodes = slice(base, base + topology.num_nodes)
        if topology.num_nodes > 1:  # a root sees all
            full[begin:end, nodes] = topology.additive_mask(device, dtype)
        if kinds.has_windows:
            keys[begin:end, nodes] = queries[begin:end]
        begin = end
    return kinds.by_layer_type(full, queries, keys)
