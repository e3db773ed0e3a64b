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
from typing import Any

import torch
from transformers import PreTrainedModel

from ..engine.backend import PromptChunk
from ..engine.cache import TreeCache
from ..engine.drafter import DeviceDrafting
from ..engine.passes.deferred_cache import DeferredCache
from ..engine.passes.hidden import HiddenStates
from ..engine.passes.inputs import PassInputs, TextNodes
from ..engine.passes.shapes import Preparation
from ..engine.passes.slot_passes import Computed, PassShape, SlotPasses
from ..engine.passes.slots import Slots
from ..engine.passes.static_cache import StaticStorage, StaticTreeCache, StaticView
from ..engine.read_out import USUAL_CANDIDATES, ReadOut, packed_read_out, read_out, unpacked
from ..engine.support import UnsupportedModelError
from ..engine.target import TargetModel
from ..engine.tree import DraftTree
from ..machine.hardware import downloaded
from .capture import CaptureFailed
from .device_step import StaticDeviceStep
from .model_state import ModelState
from .passes import Passes
from .target import NODE_STEP, StaticTarget, length_bucket

logger = logging.getLogger(__name__)

# Drafts of the trial: the root alone, and a small tree.
TRIAL_SIZES = (1, 4)
READ_OUT = "read-out"  # begins the keys of read-outs


class GraphedTarget(StaticTarget):
    """A target model on a GPU whose passes are replayed as CUDA graphs.

    Args:
        model: as for `TargetModel`.
        use_kernels: as for `TargetModel`.

    Raises:
        UnsupportedModelError: as `StaticTarget`, and if modules have hooks, which a replay would leave out.
    """

    # The first prepares libraries, the second is captured and replayed.
    calls_to_prepare = 2
    is_replayed = True
    can_be_shared = True

    def __init__(self, model: PreTrainedModel, use_kernels: bool = True) -> None:
        super().__init__(model, use_kernels)
        self._state = ModelState(model)
        if self._state.has_hooks:
            raise UnsupportedModelError("its modules have hooks, or a forward of their own")
        # Graphs hold the addresses of the rows of one storage.
        self._passes: weakref.WeakKeyDictionary[StaticStorage, Passes] = weakref.WeakKeyDictionary()
        self._slots: Slots | None = None  # of the last batch
        self._slots_lent: Callable[[], GraphedSlotPasses | None] = lambda: None
        # Numbers of candidates, and whether sketches are wanted: without a drafter's wishes, with and without
        # near-ties, and in measurements.
        self._read_out_kinds = {(1, False), (2, False), (USUAL_CANDIDATES, False)}
        self._hidden_kinds: set[tuple[int, ...]] = set()
        self._num_prepared, self._seconds = 0, 0.0
        self._is_trial = False
        with torch.inference_mode(False):
            limits = torch.tensor([0.0, torch.finfo(self.dtype).min], dtype=self.dtype)
            self._seen, self._blocked = limits.to(self.device)

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

    def hidden_states(self, layers: tuple[int, ...]) -> HiddenStates:
        """Return the capture of these hidden states; a graph leaves them where they were when it was captured."""
        return TargetModel.hidden_states(self, layers)

    def cache_over(self, storage: StaticStorage) -> DeferredCache:
        return DeferredCache(storage, storage.num_rows - NODE_STEP)

    def slot_passes(self, size: int) -> GraphedSlotPasses:
        """Return the passes of a batch; they reuse the slots and graphs of the last batch once that is gone."""
        with self.lock:
            slots = self._slots
            if self._slots_lent() is not None or (slots is not None and slots.size < size):
                slots = None
            passes = GraphedSlotPasses(self, size, slots)
            self._slots, self._slots_lent = passes.slots, weakref.ref(passes)
        return passes

    def prefill(
        self, prompt_ids: Sequence[int], cache: TreeCache, with_logits: bool
    ) -> Iterator[PromptChunk]:
        """Read the prompt as `TargetModel.prefill`; forgets graphs of a model that has changed since."""
        assert isinstance(cache, DeferredCache)
        cache.flush()
        with self.lock:
            state = ModelState(self.model)
        if state != self._state:
            self._passes.clear()
            self._state = state
        return super().prefill(prompt_ids, cache, with_logits)

    def forward(self, tree: DraftTree, cache: TreeCache) -> torch.Tensor:
        assert isinstance(cache, DeferredCache)
        num_nodes = tree.topology.num_nodes
        num_padded = self.padded_size(num_nodes)
        passes = self.passes_over(cache.storage)
        inputs = passes.inputs_of(num_padded)
        inputs.upload({0: TextNodes(cache.length, tree)}, cache.take_moves())
        length = self._length_shown(cache.length + num_padded)
        view = cache.storage.view(min(length, cache.storage.num_rows))  # a slot has any number
        self._functions.setdefault((num_padded, view.num_rows), StaticTarget.logits_of)
        hidden = self.capturing
        key = (num_padded, view.num_rows, hidden and hidden.wanted)
        rows = self.replayed(passes, key, lambda: self._pass(passes, inputs, view, hidden))
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
        with_sketches: bool,
    ) -> ReadOut:
        assert isinstance(cache, DeferredCache)
        passes = self.passes_over(cache.storage)
        if logits is not passes.last:
            return read_out(tree, logits, num_candidates, with_sketches)
        num_padded, count = self.padded_size(len(logits)), min(num_candidates, self.vocab_size)
        self._read_out_kinds.add((num_candidates, with_sketches))
        place, inputs = passes.logits[num_padded], passes.inputs_of(num_padded)
        packed = self.replayed(
            passes,
            (READ_OUT, num_padded, count, with_sketches),
            lambda: packed_read_out(place, count, with_sketches, inputs.place.token_ids[0]),
        )
        return unpacked(tree, downloaded(packed), count, has_tokens=True)

    def expect_reads(
        self, num_candidates: int, with_sketches: bool, hidden_layers: tuple[int, ...]
    ) -> None:
        """Note what is read of passes; the next warm-up captures it."""
        # One candidate is read at least, and two where near-ties are looked for.
        self._read_out_kinds |= {(max(num_candidates, least), with_sketches) for least in (1, 2)}
        if hidden_layers:
            self._hidden_kinds.add(hidden_layers)

    def device_step(
        self, drafting: DeviceDrafting, tie_margin: float, eos_ids: Collection[int]
    ) -> StaticDeviceStep | None:
        step = super().device_step(drafting, tie_margin, eos_ids)
        for passes in self._passes.values():
            passes.calls.forget(
                lambda key: (
                    isinstance(key[0], StaticDeviceStep) and key[0] not in self._device_steps
                )
            )
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
        """Call a function as `StaticTarget.call`; its arguments are constants, and `start` is given."""
        assert isinstance(cache, DeferredCache) and start is not None
        cache.flush()
        view = cache.storage.view(self._length_shown(cache.length + num_padded))
        functions.setdefault((num_padded, view.num_rows), function)

        def step() -> torch.Tensor:
            view.start.copy_(start)
            with self.kernels(num_padded):
                return function(*arguments, view)

        key = (*arguments, num_padded, view.num_rows)
        result: torch.Tensor = self.replayed(self.passes_over(cache.storage), key, step)
        return result

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

    def warm_up(self, num_tokens: int, num_nodes: Collection[int] = ()) -> None:
        """Capture ahead, as `StaticTarget.warm_up`, what was read of passes so far included."""
        super().warm_up(num_tokens, num_nodes)
        self._num_warm = self._num_prepared

    def _prepare(self, tree: DraftTree, cache: StaticTreeCache, base: int) -> None:
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
        self, passes: Passes, inputs: PassInputs, view: StaticView, hidden: HiddenStates | None
    ) -> dict[int, torch.Tensor]:
        """Run a pass over P nodes: leave its logits in their place, and return its hidden states by layer."""
        numbers = inputs.numbers()
        view.start.copy_(numbers.starts[0])
        view.move(numbers.sources, numbers.targets)
        mask = torch.where(inputs.sees[0], self._seen, self._blocked)
        with self.kernels(inputs.num_padded):
            logits = self.logits_of(numbers.token_ids[0], numbers.depths[0], mask, view)
        passes.keep_logits(logits)
        return hidden.pop() if hidden else {}

    def passes_over(self, storage: StaticStorage) -> Passes:
        """Return the graphs over the rows of a storage, and where their inputs and logits are."""
        if storage not in self._passes:
            self._passes[storage] = Passes(self.device)
        return self._passes[storage]

    def replayed(self, passes: Passes, key: tuple[object, ...], call: Callable[[], Any]) -> Any:
        """Return the output of a call, replayed if it was captured."""
        # Hooks may do more than launch kernels, and graphs hold the usual ones.
        if self._state.has_hooks or self.is_in_reference:
            return call()
        with self.lock:
            calls = passes.calls
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


class GraphedSlotPasses(SlotPasses):
    """The passes of a batch, each replayed as a graph of its shape.

    Args:
        target: the model.
        size: as of `SlotPasses`.
        slots: as of `SlotPasses`; their graphs are replayed again.
    """

    def __init__(self, target: GraphedTarget, size: int, slots: Slots | None) -> None:
        super().__init__(target, size, slots)
        self._graphed = target

    def _num_shown(self, num_rows: int) -> int:
        return length_bucket(num_rows)

    def _computed(
        self, shape: PassShape, hidden: HiddenStates | None, probes: torch.Tensor | None
    ) -> Computed:
        assert probes is None  # refused by `StaticTarget.check_probes`
        passes = self._graphed.passes_over(self.slots.storage)
        compute = super()._computed

        def call() -> dict[int, torch.Tensor]:
            done = compute(shape, hidden, None)
            passes.keep_logits(done.logits)
            return done.hidden

        key = (shape, hidden and hidden.wanted)
        rows = self._graphed.replayed(passes, key, call)
        return Computed(passes.logits[shape.num_texts * shape.num_nodes], rows)

    def _packed(
        self, shape: PassShape, logits: torch.Tensor, num_candidates: int, with_sketches: bool
    ) -> torch.Tensor:
        passes, pack = self._graphed.passes_over(self.slots.storage), super()._packed
        key = (shape.num_texts, shape.num_nodes, num_candidates, with_sketches)
        packed: torch.Tensor = self._graphed.replayed(
            passes, key, lambda: pack(shape, logits, num_candidates, with_sketches)
        )
        return packed


def graphed(
    model: PreTrainedModel,
    use_kernels: bool = True,
    say: Callable[[str], object] = logger.warning,
) -> TargetModel:
    """Return a target whose passes are replayed as CUDA graphs, where the model is on one GPU and can be captured.

    Args:
        model: as for `TargetModel`.
        use_kernels: as for `TargetModel`.
        say: gets one line if a model on one GPU cannot be captured.

    Raises:
        UnsupportedModelError: as `TargetModel`.
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
