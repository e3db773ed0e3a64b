"""The target model: a stock Hugging Face causal LM, unmodified, that can verify draft trees.

Decoding calls transformers' models here only; the parts of a pass and the proofs at load time have
folders of their own (`model.backends.passes`, `model.backends.proofs`). A tree goes
into the model as an additive 4-D float mask (a dict of masks for models with `layer_types`), explicit
positions and a `TreeCache`. What the model can verify is read from its config and proved by
`model.backends.proofs.self_test`.

Shapes: N nodes, T cached tokens, V vocabulary, L tokens of a plain pass, C prompt tokens in a
chunk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from transformers import Cache, PreTrainedModel

from ..engine.backend import PREFILL_CHUNK, PromptChunk
from ..engine.batch import SharedPasses
from ..engine.budget import MAX_DRAFT
from ..engine.levels import level_tree
from ..engine.read_out import ReadOut, read_out
from ..engine.tree import DraftTree, TreeTopology
from ..kernels.linear import MOST_ROWS_WITH_VECTORS
from ..kernels.measured_attention import ROWS
from ..kernels.registered_attention import without_cudnn
from ..machine.hardware import uploaded
from ..machine.own_forwards import attending
from .fused.fused_pass import FusedPass
from .passes.cache import TreeCache
from .passes.loaded_model import LoadedModel
from .passes.masks import Masks
from .passes.probes import reading_probes

# Most logits [C, V] of a prompt's chunk held at once. The same for all methods, whether they want logits or not,
# since other shapes round differently. Later chunks cost more than the first (their mask is a tensor), so short
# chunks are slow.
MAX_LOGITS = 2**26
FEWEST_IN_CHUNK = 512  # whatever the vocabulary
# Rows of a cache off the CPU are a multiple of this. A GPU's memory comes from an allocator that keeps what is
# freed by its size: buffers of another size for each sequence, 0.5 MB a row for 7B, would leave it in pieces.
CAPACITY_STEP = 512
# Rows shown of a slot are a multiple of this.
SHOWN_STEP = 64
# From this many rows on, all passes use the same functions: what they use is found once for all of them.
MANY_ROWS = 1 + max(MOST_ROWS_WITH_VECTORS, ROWS[-1])


class Preparation(NamedTuple):
    """Work done ahead of steps: CUDA graphs, and the time of their captures, with the first calls."""

    num_graphs: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return one line; empty if nothing was prepared."""
        plural = "s" * (self.num_graphs > 1)
        done = f"{self.num_graphs} CUDA graph{plural}, prepared in {self.seconds:.1f} s"
        return done if self.num_graphs else ""


def most_in_chunk(vocab_size: int) -> int:
    """Return the most tokens of a prompt that one pass reads."""
    return min(PREFILL_CHUNK, max(FEWEST_IN_CHUNK, MAX_LOGITS // vocab_size))


class PassShapes:
    """The shapes of passes and what is read of them: a stock model takes any, with nothing to prepare.

    CUDA graphs need a few fixed ones (`model.backends.graphs.graphed_target`), prepared before times are measured.
    """

    def now_ns(self) -> int:
        """Return the time by which steps are measured, in nanoseconds."""
        return time.perf_counter_ns()

    @property
    def num_prepared(self) -> int:
        """Calls captured so far; a step in which one was is not used to learn costs."""
        return 0

    @property
    def num_late(self) -> int:
        """Shapes prepared after the last warm-up, which a measured time then includes."""
        return 0

    @property
    def preparation(self) -> Preparation:
        """The graphs captured so far."""
        return Preparation()

    def padded_size(self, num_nodes: int) -> int:
        """Return the rows of a pass over a draft of this many nodes."""
        return num_nodes

    def expect_drafts(self, num_nodes: Collection[int]) -> None:
        """Note sizes of drafts that may come, for the next warm-up."""

    def expect_reads(
        self, num_candidates: int, with_samples: bool, hidden_layers: tuple[int, ...]
    ) -> None:
        """Note what is read of passes, for the next warm-up."""

    def warm_up(self, num_tokens: int, num_nodes: Collection[int] = ()) -> None:
        """Prepare passes over drafts of these sizes after sequences of up to `num_tokens` tokens."""

    def read_out(
        self,
        cache: Any,
        tree: DraftTree,
        logits: torch.Tensor,
        num_candidates: int,
        with_samples: bool,
    ) -> ReadOut:
        """Copy to the host what is read of the last pass with this cache, over this tree (`read_out`)."""
        return read_out(tree, logits, num_candidates, with_samples)

    def device_step(self, drafting: Any, tie_margin: float, eos_ids: Collection[int]) -> Any:
        """Return a drafter's steps that run whole on the device; None if they cannot."""
        return None

    def replayed(self, storage: Any, key: tuple[object, ...], call: Callable[[], Any]) -> Any:
        """Return the output of a call over the rows of a storage; what may replay it tells it by its key."""
        return call()

    def fused_for(self, topology: TreeTopology, base: int) -> FusedPass | None:
        """Return the fused passes that may read a draft after `base` rows; None: the stock model reads it."""
        return None

    def stored(self, storage: Any, logits: torch.Tensor) -> torch.Tensor:
        """Return a pass's logits where later calls over this storage may read them."""
        return logits

    def rows_shown(self, num_rows: int) -> int:
        """Return the rows of each slot that a pass shows which reads and writes this many."""
        return -(-num_rows // SHOWN_STEP) * SHOWN_STEP

    def slot_passes(self, size: int) -> SharedPasses | None:
        """Return passes over slots in a way of this target's own, for up to `size` sequences; None: the usual
        ones.
        """
        return None


class TargetModel(PassShapes, LoadedModel):
    """A loaded model whose passes run as it is, or by our kernels on a CPU: the backend of the loop.

    Args and errors as of `LoadedModel`.
    """

    def like(self, model: PreTrainedModel) -> TargetModel:
        """Return a target for another model on the same device, whose passes run as those of this one."""
        return TargetModel(model, self.use_kernels)

    def new_cache(self, capacity: int) -> TreeCache:
        """Return an empty cache for `capacity` tokens (prompt, new tokens and one tree), or a few more."""
        if self.device.type != "cpu":
            capacity = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
        return self._layout.new_cache(capacity)

    @property
    def chain_only(self) -> bool:
        """Whether drafts must be chains."""
        return bool(self.chain_reason)

    def chain_only_at(self, base: int, num_nodes: int) -> bool:
        """Whether a draft of up to `num_nodes` nodes after `base` cached tokens must be a chain."""
        return self.chain_only or (any(self.borders) and self.borders.are_crossed(base, num_nodes))

    def max_depth_at(self, base: int) -> int:
        """Return how deep a draft after `base` cached tokens may be."""
        return self.borders.max_depth(base) if self.borders.rope else MAX_DRAFT

    def reads_anew_at(self, base: int) -> bool:
        """Whether a text that has grown to `base` cached tokens is read again before the next one."""
        return self.borders.reads_anew and base == self.borders.rope

    def forward(self, tree: DraftTree, cache: TreeCache) -> torch.Tensor:
        """Append all nodes to the cache; return the logits after every node [N, V], valid until the next pass."""
        base = cache.length
        topology = tree.topology
        masks, positions = None, None
        with self.kernels(topology.num_nodes):
            if self._needs_mask(topology):
                masks = self.masks.of_tree(topology, base, self.device, self.dtype)
                positions = topology.depth_tensor(self.device) + base
            with self._branching(topology, cache):
                token_ids = tree.token_ids
                if token_ids.device != self.device:
                    token_ids = uploaded(token_ids, self.device)
                return self.run(token_ids, base, cache, masks, positions, probes=tree.probe)

    @contextmanager
    def kernels(self, num_rows: int, is_packed: bool = False) -> Iterator[None]:
        """Within the block the model uses the kernels for a pass over `num_rows` rows, of several sequences if it
        is packed.
        """
        with self.lock, nullcontext() if self.device.type == "cpu" else without_cudnn(self.device):
            in_programs = self.programs.are_used(num_rows, self.is_in_reference)
            kind = (min(num_rows, MANY_ROWS), is_packed, in_programs, self.is_in_reference)
            if kind not in self._swaps:
                self._swaps[kind] = self._swap(*kind)
            attention, forwards = self._swaps[kind]
            with attending(self.config, attention):
                if in_programs:
                    self.programs.begin_pass()
                with forwards.patched():
                    yield

    def _needs_mask(self, topology: TreeTopology) -> bool:
        """Whether a draft is given a mask; the model's own causal mask is enough for a chain.

        On a GPU that mask is boolean, and is made additive and aligned anew in every layer.
        """
        if topology.is_chain and (self.device.type != "cuda" or self.chain_only):
            return False
        return topology.num_nodes > 1 and self._attention_shape is not None

    def _branching(self, topology: TreeTopology, cache: TreeCache) -> AbstractContextManager[None]:
        """Return the block to read a draft in: states are read from each node's parent on."""
        if topology.num_nodes == 1 or not self.mixers:
            return nullcontext()  # plain decoding
        tree = level_tree(topology, self.device)
        return cache.states.branching(self.mixers.over(tree, cache.layers, cache.length))

    def prefill(
        self, prompt_ids: Sequence[int], cache: TreeCache, with_logits: bool
    ) -> Iterator[PromptChunk]:
        """Read the prompt in chunks from the cache's end to its last token, which is the first tree's root."""
        read = prompt_ids[:-1]
        size = most_in_chunk(self.vocab_size)
        is_beyond = len(prompt_ids) > (self.borders.rope or math.inf)
        if is_beyond:
            size, with_logits = len(read), False
        elif not self.is_same_in_parts:  # such as recurrences that begin anew with each chunk
            with_logits = with_logits and len(read) <= size
            size = max(1, len(read))
        for begin in range(cache.length, len(read), size):
            chunk = read[begin : begin + size]
            # Frequencies beyond a border follow the prompt's last token, whose row is not kept.
            token_ids = uploaded(prompt_ids[begin:] if is_beyond else chunk, self.device)
            logits = self.read(token_ids, begin, cache, last_logits_only=not with_logits)
            if is_beyond:
                cache.keep(len(read), ())
                if hidden := self.capturing:
                    hidden.put(hidden.pop(), len(chunk))
            yield PromptChunk(chunk, logits if with_logits else None)

    def read(
        self, token_ids: torch.Tensor, base: int, cache: TreeCache, last_logits_only: bool
    ) -> torch.Tensor:
        """Run the model on a chunk of the prompt; as `run`."""
        with self.kernels(len(token_ids)):
            return self.run(token_ids, base, cache, None, last_logits_only=last_logits_only)

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next counts finished work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(
        self,
        token_ids: torch.Tensor,
        base: int,
        cache: Cache,
        masks: Masks | None,
        positions: torch.Tensor | None = None,
        last_logits_only: bool = False,
        probes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model on `token_ids` [L] after `base` cached tokens; return logits [L, V] or the last, [1, V].

        Args:
            token_ids: [L].
            base: cached tokens.
            cache: of the sequence, to which the rows are appended.
            masks: what each row sees; None: the sequence up to it.
            positions: [L]; None: those after the cached tokens.
            last_logits_only: whether the last row's logits suffice.
            probes: the embedding of tokens `PROBE`, [D] or [L, D]; None if there are none.
        """
        arguments: dict[str, object] = {self.cache_argument: cache}
        if self.borders.is_dynamic and base + len(token_ids) >= (self.borders.rope or 0):
            self._forget_longer_texts()
        if "position_ids" in self.parameters:
            if positions is None:
                positions = torch.arange(base, base + token_ids.shape[0], device=self.device)
            arguments["position_ids"] = positions[None]
        if self.wants_positions:
            arguments["cache_position"] = self._layout.cache_position(base, len(token_ids))
        if masks is not None:
            arguments["attention_mask"] = masks
        if last_logits_only and "logits_to_keep" in self.parameters:
            arguments["logits_to_keep"] = 1
        input_ids, is_ours = token_ids[None], isinstance(cache, TreeCache)
        embedding = self.model.get_input_embeddings
        with (
            cache.states.reading(len(token_ids)) if is_ours and cache.has_states else nullcontext(),
            nullcontext(input_ids)
            if probes is None
            else reading_probes(embedding(), input_ids, probes) as input_ids,
        ):
            logits: torch.Tensor = self.model(
                input_ids=input_ids, **arguments, use_cache=True, return_dict=True
            ).logits
        return logits[0].to(self.device)  # a model spread over devices returns them on its last one

    def _forget_longer_texts(self) -> None:
        """Let dynamic rotary embeddings begin again at their border, as transformers does at any short pass.

        They remember the longest text so far and take its frequencies for shorter ones, too.
        """
        first = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        for module in self.model.modules():
            kind = getattr(module, "rope_type", "")
            for name, of_layers in kind.items() if isinstance(kind, dict) else [(None, kind)]:
                if "dynamic" in of_layers:
                    named = {} if name is None else {"layer_type": name}
                    module(first.to(self.dtype), first, **named)
