"""Passes replayed as CUDA graphs: the model's own kernels, launched all at once.

A decoding step of a 7B model launches some 1,300 kernels from Python, which takes longer than the
kernels. A CUDA graph holds them all and is launched once. No compiler is needed: a graph is captured
while the stock model runs, which takes about as long as one step.

A step is then one upload from pinned memory, one replay for the pass, one for the read-out, and one
download, for which alone the host waits. What a graph cannot hold (a model that asks the device for a
number while it runs) is found when the model is loaded.

Shapes: N nodes of a draft, P nodes of its bucket, M cache rows of a bucket, V vocabulary.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel

from ...engine.backend import PromptChunk
from ...engine.drafter import DeviceDrafting
from ...engine.read_out import USUAL_CANDIDATES, ReadOut, joined_read_out, read_out, split_read_out
from ...engine.tree import DraftTree, TreeTopology
from ...machine.hardware import downloaded
from ..fused.fused_pass import FusedPass
from ..fused.proof import fused_pass, why_unavailable
from ..passes.cache import TreeCache
from ..passes.hidden import HiddenStates
from ..passes.slot_passes import SlotPasses
from ..passes.slots import Slots
from ..passes.static_cache import GraphCache, PassInputs, SequenceNodes, StaticStorage, StaticView
from ..proofs.snapshot import ModelSnapshot
from ..proofs.support import UnsupportedModelError
from ..target import Preparation, TargetModel
from .captured import NODE_STEP, CaptureFailed, Passes, length_bucket, node_bucket
from .device_step import StaticDeviceStep, logits_of

logger = logging.getLogger(__name__)

# Drafts of the trial: the root alone, and a small tree.
TRIAL_SIZES = (1, 4)
# Device steps are kept, with their graphs, for this many drafters.
MAX_DEVICE_STEPS = 4
READ_OUT = "read-out"  # begins the keys of read-outs


class GraphedTarget(TargetModel):
    """A target model on a GPU whose passes are replayed as CUDA graphs.

    Args:
        model: as for `TargetModel`.
        use_kernels: as for `TargetModel`.

    Raises:
        UnsupportedModelError: if the model verifies chains only, keeps states, chooses among keys or is spread
            over devices, or if modules have hooks, which a replay would leave out.
    """

    # The first prepares libraries, the second is captured and replayed.
    calls_to_prepare = 2
    is_replayed = True

    def __init__(self, model: PreTrainedModel, use_kernels: bool = True) -> None:
        super().__init__(model, use_kernels)
        if self._has_hooks:
            raise UnsupportedModelError("its modules have hooks, or a forward of their own")

    def find(self) -> None:
        super().find()
        name = f"model type {self.config.model_type}"
        if self.chain_only:
            raise UnsupportedModelError(
                f"{name}: static shapes need tree masks, but {self.chain_reason}"
            )
        if self.mixers or any(shape and shape.index_keys for shape in self.layer_shapes):
            raise UnsupportedModelError(
                f"{name}: static shapes allow only keys and values, not recurrent states or index keys"
            )
        devices = {parameter.device for parameter in self.model.parameters()}
        if len(devices) > 1:
            raise UnsupportedModelError(
                f"{name}: is spread over {len(devices)} devices; static shapes allow one"
            )
        self._storage: StaticStorage | None = None
        self._lent: Callable[[], GraphCache | None] = lambda: None
        # Of passes so far: (bucket of nodes, bucket of rows).
        self._shapes: set[tuple[int, int]] = set()
        self._device_steps: list[StaticDeviceStep] = []  # of the last drafters
        self._expected: set[int] = set()  # sizes of drafts that may come
        self._num_warm: int | None = None  # calls prepared at the last warm-up
        # A replay would leave them out.
        self._has_hooks = bool(self.snapshot.own.hooks) or any(
            "forward" in vars(module) for module in self.model.modules()
        )
        # Graphs hold the addresses of the rows of one storage.
        self._passes: weakref.WeakKeyDictionary[StaticStorage, Passes] = weakref.WeakKeyDictionary()
        self._slots: Slots | None = None  # of the last batch
        self._slots_lent: Callable[[], SlotPasses | None] = lambda: None
        # Numbers of candidates, and whether logit samples are wanted: without a drafter's wishes, with and without
        # near-ties, and in measurements.
        self._read_out_kinds = {(1, False), (2, False), (USUAL_CANDIDATES, False)}
        self._hidden_kinds: set[tuple[int, ...]] = set()
        self._num_prepared, self._seconds = 0, 0.0
        self._is_trial = False
        self._find_fused()

    def _find_fused(self) -> None:
        """Find the fused passes of the model; without them the stock model's kernels are captured."""
        self.fused: FusedPass | None = None
        self.why_not_fused = why_unavailable(self.device)
        if not self.use_kernels or self._has_hooks or self.why_not_fused:
            return
        try:
            self.fused = fused_pass(self)
        # A model's own code, and a compiler, may raise anything.
        except Exception as error:
            self.why_not_fused = (str(error).splitlines() or [type(error).__name__])[0]
        logger.info("passes: %s", self.fused.name if self.fused else f"stock, {self.why_not_fused}")
        self.snapshot = ModelSnapshot(self.model)  # with merged weights

    def fused_for(self, topology: TreeTopology, base: int) -> FusedPass | None:
        is_off = not self.use_kernels or self._has_hooks or self.is_in_reference
        if self.fused is None or is_off or not self.fused.takes(topology, base):
            return None
        return self.fused

    @property
    def has_kernels(self) -> bool:
        return super().has_kernels or (self.use_kernels and self.fused is not None)

    @property
    def kernel_names(self) -> dict[str, str]:
        return super().kernel_names | {"passes": self.fused.name if self.fused else "stock"}

    def like(self, model: PreTrainedModel) -> TargetModel:
        """Return a target of another model, with graphs where it can be captured."""
        return graphed(model, self.use_kernels)

    def switch_kernels(self, use_kernels: bool) -> None:
        """Use kernels from now on, or none; graphs with the others are forgotten."""
        super().switch_kernels(use_kernels)
        self._passes.clear()

    def try_capture(self) -> None:
        """Capture a pass over the root alone, and one over a tree.

        Raises:
            CaptureFailed: if the model does what a graph cannot hold, or fails in static shapes.
        """
        self._is_trial = True
        cache = self.new_cache(max(TRIAL_SIZES))
        try:
            for size in TRIAL_SIZES:
                self._prepare(DraftTree.star([0] * size), cache, 0)
        # A model's own code may raise anything.
        except Exception as error:
            raise CaptureFailed.of(error) from error
        self._is_trial = False
        if failure := self.passes_over(cache.storage).calls.failure:
            raise CaptureFailed(failure)

    def check_probes(self) -> None:
        """Refuse: a graph does not notice another forward of the embedding.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            "graphs: such passes read only tokens, and this method appends masks; on a GPU give graphs off "
            "(in Python a TargetModel)"
        )

    def new_cache(self, capacity: int) -> GraphCache:
        """Return an empty cache for `capacity` tokens (prompt, new tokens and one tree).

        It reuses the rows of the last cache once that is freed, since graphs hold addresses.
        """
        # A padded tree writes beyond its nodes.
        num_rows = length_bucket(capacity + NODE_STEP)
        with self.lock:
            storage = self._storage
            if storage is None or self._lent() is not None or storage.num_rows < num_rows:
                storage = StaticStorage(self.layer_shapes, num_rows, self.device)
            cache = GraphCache(storage, storage.num_rows - NODE_STEP)
            self._storage, self._lent = storage, weakref.ref(cache)
        return cache

    def padded_size(self, num_nodes: int) -> int:
        return node_bucket(num_nodes)

    def rows_shown(self, num_rows: int) -> int:
        return length_bucket(num_rows)

    def slot_passes(self, size: int) -> SlotPasses:
        """Return the passes of a batch; they reuse the slots and graphs of the last batch once that is gone."""
        with self.lock:
            slots = self._slots
            if self._slots_lent() is not None or (slots is not None and slots.size < size):
                slots = None
            passes = SlotPasses(self, size, slots)
            self._slots, self._slots_lent = passes.slots, weakref.ref(passes)
        return passes

    def _use(self, snapshot: ModelSnapshot) -> None:
        is_elsewhere = snapshot.addresses != self.snapshot.addresses
        super()._use(snapshot)
        if is_elsewhere:
            self._passes.clear()  # graphs hold addresses
            code = self.snapshot.code
            self._find_fused()
            self.snapshot.code = code

    def prefill(
        self, prompt_ids: Sequence[int], cache: TreeCache, with_logits: bool
    ) -> Iterator[PromptChunk]:
        assert isinstance(cache, GraphCache)
        cache.flush()
        return super().prefill(prompt_ids, cache, with_logits)

    def forward(self, tree: DraftTree, cache: TreeCache) -> torch.Tensor:
        assert isinstance(cache, GraphCache)
        num_nodes = tree.topology.num_nodes
        num_padded = self.padded_size(num_nodes)
        passes = self.passes_over(cache.storage)
        inputs = passes.inputs_of(num_padded)
        inputs.upload({0: SequenceNodes(cache.length, tree)}, cache.take_moves())
        length = length_bucket(cache.length + num_padded)
        view = cache.storage.view(min(length, cache.storage.num_rows))  # a slot has any number
        self._shapes.add((num_padded, view.num_rows))
        hidden = self.capturing
        fused = self.fused_for(tree.topology, cache.length)
        key = (num_padded, view.num_rows, hidden and hidden.wanted, fused)
        call = partial(self._pass, passes, inputs, view, hidden, fused)
        rows = self.replayed(cache.storage, key, call)
        cache.append(num_nodes)
        if hidden:
            self._hidden_kinds.add(hidden.wanted)
            hidden.put(rows, num_nodes)
        passes.last = passes.logits[num_padded][:num_nodes]
        return passes.last

    def read_out(
        self,
        cache: TreeCache,
        tree: DraftTree,
        logits: torch.Tensor,
        num_candidates: int,
        with_samples: bool,
    ) -> ReadOut:
        assert isinstance(cache, GraphCache)
        passes = self.passes_over(cache.storage)
        if logits is not passes.last:
            return read_out(tree, logits, num_candidates, with_samples)
        num_padded, count = self.padded_size(len(logits)), min(num_candidates, self.vocab_size)
        self._read_out_kinds.add((num_candidates, with_samples))
        place, inputs = passes.logits[num_padded], passes.inputs_of(num_padded)
        joined = self.replayed(
            cache.storage,
            (READ_OUT, num_padded, count, with_samples),
            lambda: joined_read_out(place, count, with_samples, inputs.place.token_ids[0]),
        )
        return split_read_out(tree, downloaded(joined), count, has_tokens=True)

    def expect_reads(
        self, num_candidates: int, with_samples: bool, hidden_layers: tuple[int, ...]
    ) -> None:
        """Note what is read of passes; the next warm-up captures it."""
        # One candidate is read at least, and two where near-ties are looked for.
        self._read_out_kinds |= {(max(num_candidates, least), with_samples) for least in (1, 2)}
        if hidden_layers:
            self._hidden_kinds.add(hidden_layers)

    def device_step(
        self, drafting: DeviceDrafting, tie_margin: float, eos_ids: Collection[int]
    ) -> StaticDeviceStep | None:
        for step in self._device_steps:
            if step.is_for(drafting, tie_margin, eos_ids):
                return step
        step = StaticDeviceStep(self, drafting, tie_margin, eos_ids)
        self._device_steps = [step, *self._device_steps[: MAX_DEVICE_STEPS - 1]]
        for passes in self._passes.values():
            passes.calls.forget(
                lambda key: (
                    isinstance(key[0], StaticDeviceStep) and key[0] not in self._device_steps
                )
            )
        return step

    @property
    def known_shapes(self) -> list[tuple[int, int]]:
        """Shapes used so far by passes and whole steps: (bucket of nodes, bucket of rows)."""
        return [*self._shapes, *(shape for step in self._device_steps for shape in step.shapes)]

    def expect_drafts(self, num_nodes: Collection[int]) -> None:
        self._expected |= set(num_nodes)

    @property
    def preparation(self) -> Preparation:
        graphs = [passes.calls for passes in self._passes.values()]
        return Preparation(num_graphs=sum(map(len, graphs)), seconds=self._seconds)

    @property
    def num_prepared(self) -> int:
        """Calls so far that were no replay; their time is not that of a step."""
        return self._num_prepared

    @property
    def num_late(self) -> int:
        """Calls after the last warm-up that were no replay; 0 before it."""
        return 0 if self._num_warm is None else self._num_prepared - self._num_warm

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, num_nodes: Collection[int] = ()) -> None:
        """Prepare all shapes ahead, so that no timed step captures a graph.

        Runs drafts after a sequence of every length bucket up to `num_tokens` tokens: drafts of these
        sizes, of all sizes seen so far and, with an automatic budget, of the sizes it chooses from; also
        what was read of passes so far.
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
                # The shortest sequence of its length bucket: a longer one may not fit the context.
                base = max(0, length // 2 + 1 - bucket) if length > length_bucket(1) else 0
                self._prepare(tree, cache, base)
                length *= 2
        lengths = {length for _, length in self._shapes}
        for step, length in product(self._device_steps, lengths):
            for _ in range(self.calls_to_prepare):
                cache.keep(length // 2, ())
                step.warm_up(cache)
        cache.keep(0, (1,))
        self._num_warm = self._num_prepared

    def _prepare(self, tree: DraftTree, cache: GraphCache, base: int) -> None:
        for layers in (None, *self._hidden_kinds):
            hidden = self.hidden_states(layers) if layers else None
            for _ in range(self.calls_to_prepare):
                cache.keep(base, ())
                with hidden.captured() if hidden else nullcontext():
                    logits = self.forward(tree, cache)
                    if hidden:
                        hidden.take(tree.topology.num_nodes)
        for kind in list(self._read_out_kinds):
            for _ in range(self.calls_to_prepare):
                self.read_out(cache, tree, logits, *kind)

    def _pass(
        self,
        passes: Passes,
        inputs: PassInputs,
        view: StaticView,
        hidden: HiddenStates | None,
        fused: FusedPass | None,
    ) -> dict[int, torch.Tensor]:
        """Run a pass over P nodes: leave its logits in their place, and return its hidden states by layer."""
        numbers = inputs.numbers()
        view.start.copy_(numbers.starts[0])
        view.move(numbers.sources, numbers.targets)
        nodes = (numbers.token_ids[0], numbers.depths[0], inputs.sees)
        with self.kernels(inputs.num_padded):
            logits = logits_of(self, *nodes, view, fused)
        passes.keep_logits(logits)
        return hidden.pop() if hidden else {}

    def passes_over(self, storage: StaticStorage) -> Passes:
        """Return the graphs over the rows of a storage, and where their inputs and logits are."""
        if storage not in self._passes:
            self._passes[storage] = Passes(self.device)
        return self._passes[storage]

    def stored(self, storage: StaticStorage, logits: torch.Tensor) -> torch.Tensor:
        passes = self.passes_over(storage)
        passes.keep_logits(logits)
        return passes.logits[len(logits)]

    def replayed(self, storage: Any, key: tuple[object, ...], call: Callable[[], Any]) -> Any:
        """Return the output of a call, replayed if it was captured."""
        # Hooks may do more than launch kernels, and graphs hold the usual ones.
        if self._has_hooks or self.is_in_reference:
            return call()
        with self.lock:
            calls = self.passes_over(storage).calls
            num_before, seconds_before = calls.num_prepared, calls.seconds
            output = calls.run(key, call)
            self._num_prepared += calls.num_prepared - num_before
            self._seconds += calls.seconds - seconds_before
            if calls.failure and not self._is_trial:
                logger.warning(
                    "a pass cannot be captured as a CUDA graph, so it is launched kernel by kernel: %s",
                    calls.failure,
                )
                calls.failure = ""
        return output


def graphed(
    model: PreTrainedModel, use_kernels: bool = True, say: Callable[[str], object] = logger.warning
) -> TargetModel:
    """Return a target whose passes are replayed as CUDA graphs, where the model is on one GPU and can be captured.

    Arguments and errors are as of `TargetModel`; `say` gets one line if a model on one GPU cannot be captured.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or model.device.type != "cuda":
        return TargetModel(model, use_kernels)
    try:
        target = GraphedTarget(model, use_kernels)
        with torch.inference_mode():
            target.try_capture()
    except (CaptureFailed, UnsupportedModelError) as error:
        say(
            f"CUDA graphs cannot hold this model's passes, so each kernel is launched by itself: {error}"
        )
        return TargetModel(model, use_kernels)
    return target
