"""Static shapes: a target model whose steps each run in one of a few fixed shapes.

A GPU idles while the host launches a thousand small kernels for each step. CUDA graphs remove that
cost, but they need fixed shapes and addresses. So a draft is padded to a bucket of nodes, the cache
shows a bucket of rows, and whatever changes from step to step (the length of the text, the tree's
mask) is a tensor.

`StaticTarget` is that path alone; `model.compiled.graphs` replays it on a GPU. The prompt is read
as by `TargetModel`: it is read once, and has too many lengths for a graph each.

Shapes: N nodes of a draft, P nodes of its bucket, M cache rows of a bucket, H key-value heads, D
head dimension, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from itertools import product
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..engine.cache import TreeCache
from ..engine.drafter import DeviceDrafting
from ..engine.passes.hidden import HiddenStates
from ..engine.passes.static_cache import StaticStorage, StaticTreeCache, StaticView
from ..engine.support import UnsupportedModelError
from ..engine.target import TargetModel
from ..engine.tree import DraftTree, TreeTopology
from ..machine.hardware import uploaded
from .device_step import StaticDeviceStep

# Kernels work in tiles of 8 rows, and each bucket costs a capture; 88 holds the paper's 81 nodes.
NODE_BUCKETS = (1, 4, 8, 16, 32, 48, 64, 88, 128)
NODE_STEP = 64  # between larger buckets
SHORTEST_LENGTH = 512
# Device steps are kept, with their graphs, for this many drafters.
MAX_DEVICE_STEPS = 4


def node_bucket(num_nodes: int) -> int:
    """Return the number of nodes to which a draft is padded."""
    for bucket in NODE_BUCKETS:
        if num_nodes <= bucket:
            return bucket
    return -(-num_nodes // NODE_STEP) * NODE_STEP


def length_bucket(num_rows: int) -> int:
    """Return the cache rows shown to a pass that reads and writes `num_rows`: a power of two."""
    return max(SHORTEST_LENGTH, 1 << (num_rows - 1).bit_length())


class StaticTarget(TargetModel):
    """A target model that verifies drafts in static shapes.

    Args:
        model: as for `TargetModel`.
        use_kernels: as for `TargetModel`.

    Raises:
        UnsupportedModelError: if the model verifies chains only, or is spread over devices.
    """

    can_be_shared = False
    # Calls of a shape until no later one takes longer for being among the first.
    calls_to_prepare = 1

    def __init__(self, model: PreTrainedModel, use_kernels: bool = True) -> None:
        super().__init__(model, use_kernels)
        name = f"model type {self.config.model_type}"
        if self.chain_only:
            raise UnsupportedModelError(
                f"{name}: static shapes need tree masks, but {self.chain_reason}"
            )
        if self.mixers or any(shape and shape.index_keys for shape in self.layer_shapes):
            raise UnsupportedModelError(
                f"{name}: static shapes allow only keys and values, not recurrent states or index keys"
            )
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise UnsupportedModelError(
                f"{name}: is spread over {len(devices)} devices; static shapes allow one"
            )
        self._storage: StaticStorage | None = None
        self._lent: Callable[[], StaticTreeCache | None] = lambda: None
        # Weak keys, since some drafters make a new topology at every step.
        self._padded: weakref.WeakKeyDictionary[TreeTopology, tuple[torch.Tensor, torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        # The function for a pass of each shape: (bucket of nodes, bucket of rows).
        self._functions: dict[tuple[int, int], Any] = {}
        self._device_steps: list[StaticDeviceStep] = []  # of the last drafters
        self._expected: set[int] = set()  # sizes of drafts that may come
        self._num_warm: int | None = None  # shapes known at the last warm-up

    def hidden_states(self, layers: tuple[int, ...]) -> HiddenStates:
        """Refuse: passes in static shapes show none by themselves.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            "this method reads hidden states, which passes in static shapes do not show"
        )

    def check_probes(self) -> None:
        """Refuse: a graph does not notice another forward of the embedding.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            "graphs: such passes read only tokens, and this method appends masks; on a GPU give graphs off "
            "(in Python a TargetModel)"
        )

    def new_cache(self, capacity: int) -> StaticTreeCache:
        """Return an empty cache for `capacity` tokens (prompt, new tokens and one tree).

        It reuses the rows of the last cache once that is freed, since graphs hold addresses.
        """
        # A padded tree writes beyond its nodes.
        num_rows = length_bucket(capacity + NODE_STEP)
        with self.lock:
            storage = self._storage
            if storage is None or self._lent() is not None or storage.num_rows < num_rows:
                storage = StaticStorage(self.layer_shapes, num_rows, self.device)
            cache = self.cache_over(storage)
            self._storage, self._lent = storage, weakref.ref(cache)
        return cache

    def cache_over(self, storage: StaticStorage) -> StaticTreeCache:
        return StaticTreeCache(storage, storage.num_rows - NODE_STEP)

    def padded_size(self, num_nodes: int) -> int:
        return node_bucket(num_nodes)

    def forward(self, tree: DraftTree, cache: TreeCache) -> torch.Tensor:
        assert isinstance(cache, StaticTreeCache)
        num_nodes = tree.topology.num_nodes
        depths, mask = self.padded_topology(tree.topology)
        num_padded = depths.shape[0]
        token_ids = uploaded(tree.token_ids, self.device)
        if num_padded > num_nodes:
            token_ids = torch.nn.functional.pad(token_ids, (0, num_padded - num_nodes))
        arguments = (self, token_ids, depths, mask)
        logits = self.call(StaticTarget.logits_of, self._functions, arguments, cache, num_padded)[
            :num_nodes
        ]
        cache.append(num_nodes)
        return logits

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, num_nodes: Collection[int] = ()) -> None:
        """Prepare all shapes ahead, so that no timed step captures a graph.

        Runs drafts after a text of every length bucket up to `num_tokens` tokens: drafts of these
        sizes, of all sizes seen so far and, with an automatic budget, of the sizes it chooses from.
        """
        buckets = {
            1,
            *map(self.padded_size, (*num_nodes, *self._expected)),
            *(nodes for nodes, _ in self.known_shapes),
        }
        cache = self.new_cache(num_tokens + max(buckets))
        for bucket in sorted(buckets):
            tree = DraftTree.star([0] * bucket)
            length = length_bucket(bucket)
            while length <= length_bucket(num_tokens + bucket):
                # The shortest text of its length bucket: a longer one may not fit the context.
                base = max(0, length // 2 + 1 - bucket) if length > SHORTEST_LENGTH else 0
                self._prepare(tree, cache, base)
                length *= 2
        lengths = {length for _, length in self._functions}
        for step, length in product(self._device_steps, lengths):
            for _ in range(self.calls_to_prepare):
                cache.keep(length // 2, ())
                step.warm_up(cache)
        cache.keep(0, (1,))
        self._num_warm = len(self.known_shapes)

    def _prepare(self, tree: DraftTree, cache: StaticTreeCache, base: int) -> None:
        """Run a pass over a draft after `base` rows, so that no later one takes longer for being the first."""
        cache.keep(base, ())
        self.forward(tree, cache)

    @property
    def num_late(self) -> int:
        """Number of shapes first used after the last warm-up; 0 before it."""
        return 0 if self._num_warm is None else len(self.known_shapes) - self._num_warm

    @property
    def known_shapes(self) -> list[tuple[int, int]]:
        """Shapes used so far by passes and whole steps: (bucket of nodes, bucket of rows)."""
        return [
            *self._functions,
            *(shape for step in self._device_steps for shape in step.functions),
        ]

    def expect_drafts(self, num_nodes: Collection[int]) -> None:
        self._expected |= set(num_nodes)

    def device_step(
        self, drafting: DeviceDrafting, tie_margin: float, eos_ids: Collection[int]
    ) -> StaticDeviceStep | None:
        for step in self._device_steps:
            if step.is_for(drafting, tie_margin, eos_ids):
                return step
        step = StaticDeviceStep(self, drafting, tie_margin, eos_ids)
        self._device_steps = [step, *self._device_steps[: MAX_DEVICE_STEPS - 1]]
        return step

    def call(
        self,
        function: Callable[..., torch.Tensor],
        functions: dict[tuple[int, int], Any],
        arguments: tuple[object, ...],
        cache: StaticTreeCache,
        num_padded: int,
        start: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Call a function for a pass over `num_padded` rows after those of the cache.

        Args:
            function: takes the arguments, then the view of the cache.
            functions: it, by shape; missing shapes are added.
            arguments: the function's arguments.
            cache: the rows before the pass.
            num_padded: a bucket of nodes.
            start: the number of the cache's rows on the device, if it is there already.
        """
        view = cache.storage.view(self._length_shown(cache.length + num_padded))
        if start is None:
            cache.storage.start.fill_(cache.length)
        else:
            cache.storage.start.copy_(start)
        shape = (num_padded, view.num_rows)
        functions.setdefault(shape, function)
        with self.kernels(num_padded):
            return function(*arguments, view)

    def _length_shown(self, num_rows: int) -> int:
        """Return the cache rows shown to a pass that reads and writes `num_rows`."""
        return length_bucket(num_rows)

    def logits_of(
        self, token_ids: torch.Tensor, depths: torch.Tensor, mask: torch.Tensor, view: StaticView
    ) -> torch.Tensor:
        """Return the logits [P, V] of a padded tree: token ids and depths [P], tree mask [P, P]."""
        num_padded = token_ids.shape[0]
        view.rows.begin(num_padded)
        rows = torch.arange(view.num_rows, device=self.device) - view.start  # [M], 0: the root
        nodes = rows.clamp(0, num_padded - 1)
        blocked = torch.finfo(mask.dtype).min
        full = mask[:, nodes].masked_fill(rows >= num_padded, blocked).masked_fill(rows < 0, 0)
        positions = depths + view.start
        keys = torch.where(rows < 0, rows, depths[nodes]) + view.start
        arguments: dict[str, Any] = {
            "input_ids": token_ids[None],
            "position_ids": positions[None],
            "attention_mask": self.masks.by_layer_type(full, positions, keys),
            self.cache_argument: view,
        }
        if "cache_position" in self.parameters:
            # Without it, transformers 4.57 asks the cache for its length as a number.
            arguments["cache_position"] = view.rows.next(num_padded)
        logits: torch.Tensor = self.model(**arguments, use_cache=True, return_dict=True).logits
        return logits[0]

    def padded_topology(self, topology: TreeTopology) -> tuple[torch.Tensor, torch.Tensor]:
        """Return depths [P] and additive mask [P, P] of a padded tree; padding is seen only by itself."""
        if topology not in self._padded:
            num_nodes, num_padded = topology.num_nodes, self.padded_size(topology.num_nodes)
            sees = np.eye(num_padded, dtype=bool)
            sees[:num_nodes, :num_nodes] = topology.ancestor_mask.numpy()
            blocked = np.where(sees, 0.0, torch.finfo(self.dtype).min)  # [P, P]
            mask = uploaded(torch.from_numpy(blocked).to(self.dtype), self.device)
            depths = [*topology.depths, *[0] * (num_padded - num_nodes)]
            self._padded[topology] = (uploaded(depths, self.device), mask)
        return self._padded[topology]
