"""Passes of a batch over slots: one upload, one attention call a layer and one download, however many sequences.

The sequences are a batch as stock models take it, with as many nodes each as the largest draft. A GPU takes little
longer for the rows that this adds, and each sequence attends to its own rows alone. Side by side in one row, all
nodes would attend to the rows of all sequences, of which a mask leaves one part in B.

Shapes: B sequences shown, N nodes of each, T rows shown of each slot, V vocabulary, D hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...engine.batch import SharedPass
from ...engine.read_out import ReadOut, joined_read_out, split_read_out
from ...engine.tree import DraftTree
from ...machine.hardware import downloaded
from ..fused.fused_pass import FusedPass
from ..target import TargetModel
from .cache import TreeCache
from .hidden import HiddenStates
from .masks import Masks, TreeMasks
from .probes import probes_of_sequences, reading_probes
from .slots import SlotCache, Slots
from .static_cache import SequenceNodes

# Nodes of each sequence, which all sequences together multiply, and the step between larger numbers.
NODE_BUCKETS = (1, 2, 3, 4, 6, 9, 12, 16, 24, 32, 48, 64, 88, 128)
NODE_STEP = 64


class PassShape(NamedTuple):
    """The shape of a pass: B sequences shown, N nodes of each, T rows shown of each."""

    num_sequences: int
    num_nodes: int
    num_rows: int


class Computed(NamedTuple):
    """Results of a pass, on the device: logits [B N, V], and captured hidden states by layer, [B N, D] each."""

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]


class SlotPasses:
    """The passes of a batch on a GPU (`engine.batch.SharedPasses`).

    Args:
        target: the model, on one device.
        size: most sequences.
        slots: as many or more, which no other batch uses; None: new ones.
    """

    def __init__(self, target: TargetModel, size: int, slots: Slots | None = None) -> None:
        self._target = target
        self.slots = slots or Slots(target.layer_shapes, size, target.device)
        self._lent: list[Callable[[], SlotCache | None]] = [lambda: None] * size

    def new_cache(self, capacity: int, first: TreeCache | None = None) -> SlotCache:
        """Return a cache in a free slot; where slots are too short, all sequences move to longer ones."""
        index = next(index for index, lent in enumerate(self._lent) if lent() is None)
        if capacity > self.slots.capacity:
            self.slots.lengthen(capacity, [one for lent in self._lent if (one := lent())])
        cache = SlotCache(self.slots, index)
        self._lent[index] = weakref.ref(cache)
        if first is not None:
            cache.copy_rows(first, first.length)
        return cache

    def release(self, cache: TreeCache) -> None:
        self._lent[_slot(cache).index] = lambda: None

    def is_plain(self, num_sequences: int) -> bool:
        """Return False: even a single sequence's passes have other shapes than those of the loop."""
        return False

    def forward(self, trees: Sequence[DraftTree], caches: Sequence[TreeCache]) -> SharedPass:
        pairs = [(tree, _slot(cache)) for tree, cache in zip(trees, caches, strict=True)]
        shape, slots = self._shape(pairs), self.slots
        inputs = slots.inputs_of(shape.num_sequences, shape.num_nodes)
        moves = list[tuple[int, int]]()
        for _, cache in pairs:
            begin = cache.index * slots.num_rows
            mine = cache.take_moves(inputs.most_moved - len(moves))
            moves += [(begin + source, begin + target) for source, target in mine]
        sequences = {cache.index: SequenceNodes(cache.length, tree) for tree, cache in pairs}
        inputs.upload(sequences, moves, idle_start=slots.num_rows - 1)
        hidden = self._target.capturing
        probes = probes_of_sequences(
            {cache.index: tree for tree, cache in pairs}, shape.num_sequences
        )
        found = {self._target.fused_for(tree.topology, cache.length) for tree, cache in pairs}
        fused = found.pop() if len(found) == 1 and probes is None else None
        key = (shape, hidden and hidden.wanted, fused)
        done: Computed = self._target.replayed(
            slots.storage, key, lambda: self._computed(shape, hidden, probes, fused)
        )
        for tree, cache in pairs:
            cache.append(tree.topology.num_nodes)

        def of_sequences(rows: torch.Tensor) -> list[torch.Tensor]:
            by_slot = rows.unflatten(0, (shape.num_sequences, shape.num_nodes))
            return [by_slot[cache.index, : tree.topology.num_nodes] for tree, cache in pairs]

        if hidden:
            rows = {layer: torch.cat(of_sequences(part)) for layer, part in done.hidden.items()}
            hidden.put(rows, sum(tree.topology.num_nodes for tree in trees))
        return SharedPass(of_sequences(done.logits), partial(self._read, shape, done.logits, pairs))

    def _read(
        self,
        shape: PassShape,
        logits: torch.Tensor,
        pairs: Sequence[tuple[DraftTree, SlotCache]],
        num_candidates: int,
        with_samples: bool,
    ) -> list[ReadOut]:
        """Copy what is read of a pass over these trees to the host; logits are [B N, V]."""
        count = min(num_candidates, self._target.vocab_size)
        token_ids = self.slots.inputs_of(shape.num_sequences, shape.num_nodes).place.token_ids
        key = (shape.num_sequences, shape.num_nodes, count, with_samples)
        joined = self._target.replayed(
            self.slots.storage,
            key,
            lambda: joined_read_out(logits, count, with_samples, token_ids.flatten()),
        )
        joined = downloaded(joined)
        by_slot = joined.unflatten(0, (shape.num_sequences, shape.num_nodes))
        return [split_read_out(tree, by_slot[cache.index], count, True) for tree, cache in pairs]

    def _shape(self, pairs: Sequence[tuple[DraftTree, SlotCache]]) -> PassShape:
        """Return the shape of a pass over these trees: one of a few, so that little has to be made for each."""
        most = max(tree.topology.num_nodes for tree, _ in pairs)
        buckets = (bucket for bucket in NODE_BUCKETS if bucket >= most)
        num_nodes = next(buckets, -(-most // NODE_STEP) * NODE_STEP)
        num_sequences = 1 + max(cache.index for _, cache in pairs)
        num_sequences = min(1 << (num_sequences - 1).bit_length(), self.slots.size)
        num_rows = self._target.rows_shown(num_nodes + max(cache.length for _, cache in pairs))
        return PassShape(num_sequences, num_nodes, min(num_rows, self.slots.num_rows))

    def _computed(
        self,
        shape: PassShape,
        hidden: HiddenStates | None,
        probes: torch.Tensor | None,
        fused: FusedPass | None,
    ) -> Computed:
        """Run a pass over the uploaded inputs; it captures hidden states, and reads probes [B, 1, D]."""
        target, slots = self._target, self.slots
        inputs = slots.inputs_of(shape.num_sequences, shape.num_nodes)
        view = slots.view(shape.num_sequences, shape.num_rows)
        numbers = inputs.numbers()
        slots.move(numbers.sources, numbers.targets)
        if fused:
            nodes = (numbers.token_ids, numbers.depths, inputs.sees)
            starts, last_row = (numbers.starts, numbers.bases), slots.num_rows - 1
            logits = fused.logits(*nodes, *starts, view.layers, last_row, hidden)
            return Computed(target.stored(slots.storage, logits), hidden.pop() if hidden else {})
        view.rows.begin(numbers.starts, shape.num_nodes)
        positions = numbers.depths + numbers.bases[:, None]  # [B, N]
        masks = masks_of_slots(
            target.masks, inputs.sees, numbers.starts, positions, shape.num_rows, target.dtype
        )
        with target.kernels(shape.num_nodes):
            logits = run_batch(target, numbers.token_ids, positions, masks, view, None, probes)
        kept = target.stored(slots.storage, logits.flatten(0, 1))
        return Computed(kept, hidden.pop() if hidden else {})


def _slot(cache: TreeCache) -> SlotCache:
    assert isinstance(cache, SlotCache)
    return cache


def masks_of_slots(
    kinds: TreeMasks,
    sees: torch.Tensor,  # which nodes each node sees, bool [B, N, N]
    starts: torch.Tensor,  # the row of each root, [B]
    positions: torch.Tensor,  # of the nodes, [B, N]
    num_keys: int,  # T
    dtype: torch.dtype,
) -> Masks:
    """Return the mask(s) [B, 1, N, T] of B sequences' trees, each of which sees T rows of its own sequence alone.

    All is on the device, and nothing is read by the host.
    """
    num_nodes = sees.shape[-1]
    rows = torch.arange(num_keys, device=sees.device)
    nodes = rows - starts[:, None]  # [B, T], negative before the root
    is_before, inside = nodes < 0, nodes.clamp(0, num_nodes - 1)
    seen = sees.gather(2, inside[:, None].expand(-1, num_nodes, -1))  # [B, N, T]
    seen = seen & (nodes < num_nodes)[:, None] | is_before[:, None]
    full = torch.zeros(seen.shape, dtype=dtype, device=sees.device)
    full = full.masked_fill(~seen, torch.finfo(dtype).min)
    keys = rows
    if kinds.has_windows:
        keys = torch.where(is_before, rows, positions.gather(1, inside))[:, None]  # [B, 1, T]
    return kinds.by_layer_type(full, positions, keys)


def run_batch(
    target: TargetModel,
    token_ids: torch.Tensor,  # [B, N]
    positions: torch.Tensor,  # [B, N]
    masks: Masks,
    cache: Any,  # Hugging Face's `Cache`
    rows: torch.Tensor | None = None,  # that a pass writes, [N]; None: each sequence has others
    probes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the model on N tokens of each of B sequences, as a batch; return logits [B, N, V]."""
    arguments: dict[str, object] = {target.cache_argument: cache, "attention_mask": masks}
    if "position_ids" in target.parameters:
        arguments["position_ids"] = positions
    if "cache_position" in target.parameters:
        # Without it, transformers 4.57 asks the cache for its length; masks and positions are given.
        nodes = torch.arange(token_ids.shape[1], device=target.device) if rows is None else rows
        arguments["cache_position"] = nodes
    with reading_probes(target.model.get_input_embeddings(), token_ids, probes) as input_ids:
        logits: torch.Tensor = target.model(
            input_ids=input_ids, **arguments, use_cache=True, return_dict=True
        ).logits
    return logits
